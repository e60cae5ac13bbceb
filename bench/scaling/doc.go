// Package scaling compares policies of scaling in simulated time.
package scaling
