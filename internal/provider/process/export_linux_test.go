package process

// Marked tells whether the environment in a file has the token.
var Marked = marked
