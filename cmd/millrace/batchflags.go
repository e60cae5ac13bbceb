package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/pflag"

	"github.com/millrace/millrace/dispatcher"
	"github.com/millrace/millrace/internal/config"
)

// addFeed adds what bounds a batch, and how waiting work is fed.
func addFeed(fs *pflag.FlagSet, c *dispatcher.Config) {
	c.BatchMaxLines, c.FeedAhead, c.BatchFloor = 50_000, 3*time.Second, 0.1
	fs.Int64Var(&c.BatchMaxLines, "max-batch-lines", c.BatchMaxLines, "most requests of one batch")
	fs.DurationVar(&c.FeedAhead, "feed-ahead", c.FeedAhead, "how much work is kept where workers pull it, as a time: the rest waits where it can still be decided whose turn it is")
	fs.Float64Var(&c.BatchFloor, "batch-floor", c.BatchFloor, "share of that which batch work may always fill, from 0 to below 1")
}

func checkFeed(c *dispatcher.Config) error {
	err := errors.Join(config.AtLeast("max-batch-lines", c.BatchMaxLines, 1), config.AtLeast("feed-ahead", c.FeedAhead, time.Millisecond))
	if c.BatchFloor < 0 || c.BatchFloor >= 1 {
		err = errors.Join(err, fmt.Errorf("batch-floor is %v: it must be at least 0 and below 1", c.BatchFloor))
	}
	if c.BatchFloor == 0 {
		c.BatchFloor = -1 // none, where zero is the default
	}
	return err
}
