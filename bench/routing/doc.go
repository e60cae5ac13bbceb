// Package routing compares ways of placing requests on engines: the reference routers, which push, and Millrace, whose workers pull. All arms get the same recorded
// arrivals on the same engines. It runs in virtual time on the emulator's core and Millrace's own decisions (Simulate), or at real speed on emulated engines in
// processes of their own and Millrace's whole path.
package routing
