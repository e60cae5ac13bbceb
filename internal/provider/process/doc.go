// Package process runs workers as processes of this machine: `millrace worker -- CMD`.
//
// # State
//
// A folder holds one file per instance, written before its process is started, and its log. A lock on the folder makes every change one at a time, whichever process makes it. Workers are detached: they live on when the autoscaler that started
// them ends, and the next one finds them by their files.
//
// # Failure
//
// Each instance has a token, which is in the environment of all of its processes. So a process is known for certain, also if its file was written and its process id was not; one that was never started is, by the next Start of its name; one whose id was given to another process is not taken for it; and
// nothing that an engine leaves behind is forgotten when it is stopped.
package process
