package queue

// For the tests of what stands between names and subjects.
var (
	Token   = token
	Untoken = untoken
	Hashed  = hashed
)
