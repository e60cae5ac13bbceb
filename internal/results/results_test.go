package results_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/millrace/millrace/internal/results/resultstest"
	"github.com/millrace/millrace/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConformance(t *testing.T) {
	t.Parallel()
	t.Run("redis", func(t *testing.T) { resultstest.Run(t, testenv.Redis(t).URL()) })
	t.Run("embedded", func(t *testing.T) { resultstest.Run(t, testenv.MiniRedis(t).URL()) })
}
