package bench

import (
	"slices"
	"time"
)

// Quantile returns the value below which the share q of the values lies, by the nearest rank; 0 if there are none.
func Quantile(values []time.Duration, q float64) time.Duration {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	i := int(q * float64(len(sorted)))
	return sorted[min(max(i, 0), len(sorted)-1)]
}
