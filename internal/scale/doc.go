// Package scale decides how many workers a pool needs. All of it is pure: [Decide] sees what is known at one moment and what came before, and says what to do and why; nothing here reads a clock, a queue or a provider.
package scale
