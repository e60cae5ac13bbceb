package dispatcher

// lineSet is a set of the lines of a file, by number, in pages of 4 KiB. The zero value is empty.
type lineSet struct {
	pages map[int64]*[linePage / 64]uint64
	n     int64
}

const linePage = 32768

// add puts a line in, and tells whether it was not in yet.
func (s *lineSet) add(line int64) bool {
	p := s.pages[line/linePage]
	if p == nil {
		if s.pages == nil {
			s.pages = map[int64]*[linePage / 64]uint64{}
		}
		p = new([linePage / 64]uint64)
		s.pages[line/linePage] = p
	}
	word, bit := line%linePage/64, uint64(1)<<(line%64)
	if p[word]&bit != 0 {
		return false
	}
	p[word] |= bit
	s.n++
	return true
}

func (s *lineSet) has(line int64) bool {
	p := s.pages[line/linePage]
	return p != nil && p[line%linePage/64]&(1<<(line%64)) != 0
}
