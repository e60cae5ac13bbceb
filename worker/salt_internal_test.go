package worker

import "testing"

func TestSaltsAreFramed(t *testing.T) {
	t.Parallel()
	if frame("org1", "23") == frame("org12", "3") || frame("org1", "23") == frame("org123") || frame("", "a") == frame("a", "") {
		t.Error("two lists of parts have the same salt")
	}
	// It must never change: the caches of all engines would be cold, and a fleet of two versions would have two.
	if got, want := saltOf("default"), "shs02r12Rx02Q8vLJmbE7lWCEnsk3y5f1KxFvEn-aHs"; got != want {
		t.Errorf("the salt of the default tenant is %s, want %s", got, want)
	}
	if saltOf("a") == saltOf("b") {
		t.Error("two tenants have the same salt")
	}
}
