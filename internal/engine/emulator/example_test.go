package emulator_test

import (
	"fmt"
	"time"

	"github.com/millrace/millrace/internal/engine/emulator"
)

// How long one answer of 100 tokens takes on a busy A10, without waiting for it.
func ExampleCore() {
	p, err := emulator.ProfileByName("a10-7b")
	if err != nil {
		fmt.Println(err)
		return
	}
	core := emulator.NewCore(p)
	for range 20 {
		if _, err := core.Add(emulator.Request{Prompt: 200, Output: 100}); err != nil {
			fmt.Println(err)
			return
		}
	}
	var took time.Duration
	for {
		step, ok := core.Step()
		if !ok {
			break
		}
		took += step.Duration
	}
	fmt.Println(took.Round(time.Millisecond), core.Stats().GeneratedTokens)
	// Output: 4.664s 2000
}
