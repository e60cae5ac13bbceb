package client

// ParseEvents is parseEvents, for its tests.
var ParseEvents = parseEvents
