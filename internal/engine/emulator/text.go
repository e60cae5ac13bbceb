package emulator

import (
	"bytes"
	"math"
	"strings"
	"unicode/utf8"
)

// mix turns a counter into a well-spread number (the finalizer of SplitMix64). It never returns 0 for the inputs that matter: 0 means "none".
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	x ^= x >> 31
	return max(x, 1)
}

// hash is a running FNV-1a over bytes, so that the hash of every prefix of a text is known on the way.
type hash uint64

const hashStart hash = 14695981039346656037

func (h hash) byte(b byte) hash { return (h ^ hash(b)) * 1099511628211 }

func (h hash) bytes(s []byte) hash {
	for _, b := range s {
		h = h.byte(b)
	}
	return h
}

func (h hash) string(s string) hash {
	for i := range len(s) {
		h = h.byte(s[i])
	}
	return h
}

// end closes one part of what is hashed, so that ("ab","c") and ("a","bc") differ.
func (h hash) end() hash { return h.byte(0xff) }

func (h hash) seed() uint64 { return mix(uint64(h)) }

// tokenBytes is the length of a prompt's tokens.
const tokenBytes = 4

func countTokens(prompt []byte) int { return (len(prompt) + tokenBytes - 1) / tokenBytes }

// blockNames names the full blocks of a prompt, each name standing for all before it too.
func blockNames(salt hash, prompt []byte) []uint64 {
	const size = BlockTokens * tokenBytes
	names := make([]uint64, 0, len(prompt)/size)
	for ; len(prompt) >= size; prompt = prompt[size:] {
		salt = salt.bytes(prompt[:size])
		names = append(names, salt.seed())
	}
	return names
}

// Workload is the distribution of natural answer lengths: log-normal, capped. The end token counts.
type Workload struct {
	Name   string
	Median float64
	Sigma  float64
	Cap    int
}

// Workloads returns the built-in workloads: the first is the default.
func Workloads() []Workload {
	return []Workload{
		{Name: "chat-like", Median: 140, Sigma: 1, Cap: 512},
		{Name: "seed-like", Median: 9, Sigma: 0.5, Cap: 64},
	}
}

// length is the natural length of the answer with that seed, in tokens with the end token: at least 2.
func (w Workload) length(seed uint64) int {
	u := float64(mix(seed+1)>>11+1) / (1 << 53) // (0, 1]
	v := float64(mix(seed+2)>>11) / (1 << 53)
	z := math.Sqrt(-2*math.Log(u)) * math.Cos(2*math.Pi*v)
	return min(max(int(math.Round(w.Median*math.Exp(w.Sigma*z))), 2), w.Cap)
}

// The words of answers. The last ones are there to be escaped, cut between bytes, and otherwise mishandled.
var words = strings.Fields(`a about above across act after again age air all along also always among and answer any area as ask at away
 back base be because become before begin behind being below between big block body book both bring build but by call came can care carry
 case cause change city clear close cold come common could country course cover cross cut dark day deep did do does done down draw drive
 each early earth east easy end enough even ever every example eye face fact far fast few field find fire first five flow follow food for
 form found four free from full gave give go good great green ground group grow had half hand hard has have he head hear heat help her here
 high hold home hour house how if in into is it just keep kind king know land large last late lead learn leave left less let life light
 like line list little live long look low made main make many map mark matter may mean measure might mind more morning most mountain move
 much must name near need never new next night no north not note now number of off often old on once one only open or order other our out
 over own page paper part pass people place plain plan plant point power press problem pull question quick rain ran reach read ready real
 record rest right river road rock room round rule run said same sea second see seem sense set shape she ship short should show side simple
 since size slow small snow so some song soon sound south space stand star start state stay step still stood stop story street strong study
 such sun sure table take talk teach tell ten than that the their them then there these they thing think this those though thought thousand
 three through time to together too top town travel tree true turn two under unit until up upon use very voice walk want warm was watch water
 way we well went were west what wheel when where which while white who whole why will wind with wonder word work world would write year you
 naïve café 東京 Ω <b>bold</b> R&D "quoted" C:\temp 🚀`)

// tokens is a text and where each of its tokens ends in it.
type tokens struct {
	text []byte
	ends []int32
}

// voice utters one answer, token by token.
type voice struct {
	seed uint64
	// space begins the first word too, as where a prompt is completed and not answered.
	space bool
	// fixed, if set, is what it says instead of words: JSON, which ends where it ends.
	fixed []byte

	said  int // tokens so far
	inner bool
}

// next appends one token to t. It returns false, appending nothing, at the end of a fixed text.
func (v *voice) next(t *tokens) bool {
	if v.fixed != nil {
		at := 0
		if n := len(t.ends); n > 0 {
			at = int(t.ends[n-1])
		}
		rest := v.fixed[min(at, len(v.fixed)):]
		if len(rest) == 0 {
			return false
		}
		n := min(tokenBytes, len(rest))
		for n < len(rest) && !utf8.RuneStart(rest[n]) {
			n++
		}
		t.text = append(t.text, rest[:n]...)
		t.ends = append(t.ends, int32(len(t.text)))
		return true
	}
	h := mix(v.seed ^ mix(uint64(v.said)+0x5bd1e995))
	w := words[h%uint64(len(words))]
	if v.space && v.said == 0 || v.said > 0 && t.text[len(t.text)-1] != '\n' {
		t.text = append(t.text, ' ')
	}
	if c := w[0]; !v.inner && 'a' <= c && c <= 'z' {
		t.text = append(t.text, c-'a'+'A')
		w = w[1:]
	}
	t.text = append(t.text, w...)
	v.inner = true
	switch h >>= 32; {
	case h%12 == 0:
		t.text = append(t.text, '.')
		v.inner = false
		if h%5 == 0 {
			t.text = append(t.text, "\n\n"...)
		}
	case h%12 == 1:
		t.text = append(t.text, ',')
	}
	v.said++
	t.ends = append(t.ends, int32(len(t.text)))
	return true
}

// limits say where an answer ends.
type limits struct {
	// natural is the whole answer's length in tokens with the end token; what a partial answer has already said counts.
	natural int
	// most and least bound what is generated now.
	most, least int
	ignoreEOS   bool
	stop        []string
	keepStop    bool
}

// answer is what one choice says.
type answer struct {
	tokens        // the end token is empty
	finish string // stop or length
	stop   string // the stop string that ended it, "" if none
}

// text of token i.
func (a *answer) token(i int) []byte {
	start := int32(0)
	if i > 0 {
		start = a.ends[i-1]
	}
	return a.text[start:a.ends[i]]
}

// utter makes the answer that v gives within l, after prior has been said already. A prior that v would not say changes what it says.
func utter(v voice, prior []byte, l limits) answer {
	var t tokens
	for len(t.text) < len(prior) && bytes.HasPrefix(prior, t.text) && v.next(&t) {
	}
	a := answer{}
	natural := l.natural
	switch {
	case len(prior) == 0:
	case bytes.HasPrefix(t.text, prior):
		// What stands in prior in whole is not said again. A token that it cuts is finished first.
		if rest := t.text[len(prior):]; len(rest) > 0 {
			natural -= len(t.ends) - 1
			a.text = append(a.text, rest...)
			a.ends = append(a.ends, int32(len(rest)))
		} else {
			natural -= len(t.ends)
		}
	default:
		v = voice{seed: mix(v.seed ^ hashStart.bytes(prior).seed()), fixed: v.fixed, space: true, inner: true}
		t = tokens{}
	}
	natural = max(natural, l.least, 1)
	want := l.most
	a.finish = "length"
	if !l.ignoreEOS && natural <= l.most {
		want, a.finish = natural-1, "stop" // the end token is the last
	}
	base := len(t.text)
	for len(a.ends) < want {
		if !v.next(&t) {
			a.finish = "stop"
			break
		}
		a.text = append(a.text, t.text[base:]...)
		a.ends = append(a.ends, int32(len(a.text)))
		base = len(t.text)
	}
	if a.finish == "stop" {
		a.ends = append(a.ends, int32(len(a.text)))
	}
	a.cut(l)
	return a
}

// cut ends the answer at the first stop string, with the token that completes it.
func (a *answer) cut(l limits) {
	at, which := -1, ""
	for _, s := range l.stop {
		if i := bytes.Index(a.text, []byte(s)); i >= 0 && s != "" && (at < 0 || i+len(s) < at+len(which)) {
			at, which = i, s
		}
	}
	if at < 0 {
		return
	}
	completed := int32(at + len(which))
	n := 0
	for a.ends[n] < completed {
		n++
	}
	if l.keepStop {
		at = int(completed)
	}
	a.ends = a.ends[:n+1]
	for i := range a.ends {
		a.ends[i] = min(a.ends[i], int32(at))
	}
	a.text = a.text[:at]
	a.finish, a.stop = "stop", which
}

// completionWindow is how far back in a prompt the start of a partial answer is looked for.
const completionWindow = 64 << 10

// splitCompletion finds the partial answer that a completion's prompt may end in: what stands before it, seeded by h, would be completed by it.
// It returns where the answer begins (the prompt's length if there is none) and the seed at that place.
func splitCompletion(h hash, prompt []byte) (int, uint64) {
	from := max(len(prompt)-completionWindow, 0)
	h = h.bytes(prompt[:from])
	var t tokens
	for s := from; s < len(prompt); s++ {
		if prompt[s] == ' ' { // as every completion begins
			rest := prompt[s:]
			v := voice{seed: h.seed(), space: true}
			t.text, t.ends = t.text[:0], t.ends[:0]
			for len(t.text) < len(rest) && bytes.HasPrefix(rest, t.text) {
				v.next(&t)
			}
			// Less than one whole token proves nothing.
			if bytes.HasPrefix(t.text, rest) && int(t.ends[0]) <= len(rest) {
				return s, h.seed()
			}
		}
		h = h.byte(prompt[s])
	}
	return len(prompt), h.seed()
}
