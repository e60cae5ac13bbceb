package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/job"
)

// patience is for how long a command goes on while the server refuses for now, or is being restarted.
const patience = 30 * time.Second

func (c *clientFlags) open() (*client.Client, error) {
	cl, err := client.New(client.Config{URL: c.url, APIKey: c.key, Patience: patience, UserAgent: "millrace/" + buildVersion()})
	if err != nil {
		return nil, &exitError{exitUsage, err}
	}
	return cl, nil
}

// hints say what to do where the API refuses something for good.
var hints = map[job.Code]string{
	job.CodeJobNotFound:    "`millrace jobs list` shows those that there are",
	job.CodeBatchNotFound:  "`millrace batch list` shows those that there are",
	job.CodeWorkerNotFound: "`millrace status` shows those that there are",
	job.CodeTenantNotFound: "`millrace tenants list` shows those that there are",
	job.CodeKeyNotFound:    "`millrace keys list` shows those that there are",
	job.CodePoolNotFound:   "`millrace pools list` shows those that there are",
	job.CodeTenantExists:   "from a shell by `millrace tenants update`",
}

// explain adds to a client's error what can be done about it.
func explain(c *client.Client, err error) error {
	var refused *client.Error
	switch {
	case err == nil || errors.Is(err, context.Canceled):
		return err
	case errors.As(err, &refused) && refused.Status == 401:
		return fmt.Errorf("%w: set MILLRACE_API_KEY to a key of %s", err, c.URL())
	case errors.As(err, &refused) && refused.Status == 403:
		return fmt.Errorf("%w: set MILLRACE_API_KEY to a key that may; an operator makes one by `millrace keys create`", err)
	case errors.As(err, &refused) && hints[refused.Code] != "":
		return fmt.Errorf("%w: %s", err, hints[refused.Code])
	case errors.As(err, &refused) && refused.Status == 404 && refused.Code == "":
		return fmt.Errorf("%w: is %s a Millrace?", err, c.URL())
	case errors.Is(err, client.ErrUnreachable):
		return fmt.Errorf("%w: start one with `millrace up`, or name another with --url or MILLRACE_URL", err)
	default:
		return err
	}
}

// onlyModel returns the model that is served, if it is one alone.
func onlyModel(ctx context.Context, c *client.Client) (job.Model, error) {
	models, err := servedModels(ctx, c)
	switch {
	case err != nil:
		return "", err
	case len(models) == 0:
		return "", fmt.Errorf("%s serves no model yet: is a worker running? `millrace status` says more", c.URL())
	case len(models) > 1:
		names := make([]string, len(models))
		for i, m := range models {
			names[i] = string(m)
		}
		return "", &exitError{exitUsage, fmt.Errorf("%s serves several models: choose one with -m: %s", c.URL(), strings.Join(names, ", "))}
	}
	return models[0], nil
}

// servedModels lists the models without second names: Ollama's x:latest is its x.
func servedModels(ctx context.Context, c *client.Client) ([]job.Model, error) {
	models, err := c.Models(ctx)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(slices.Clone(models), func(m job.Model) bool {
		short, ok := strings.CutSuffix(string(m), ":latest")
		return ok && slices.Contains(models, job.Model(short))
	}), nil
}

// answerText is the text of an engine's answer or chunk: of its first choice, the thinking aside.
func answerText(body []byte) string {
	var v struct {
		Choices []struct {
			Index   int     `json:"index"`
			Text    string  `json:"text"`
			Message message `json:"message"`
			Delta   message `json:"delta"`
		} `json:"choices"`
	}
	if json.Unmarshal(body, &v) != nil {
		return ""
	}
	for _, c := range v.Choices {
		if c.Index == 0 {
			return c.Text + c.Message.Content + c.Delta.Content
		}
	}
	return ""
}

type message struct {
	Content string `json:"content"`
}

// follow prints a job's answer to out while it is written, and says on notes what else happens to it. It returns the job once it has ended.
func follow(ctx context.Context, c *client.Client, id job.ID, out, notes io.Writer) (*client.Job, error) {
	said, written := "", false
	note := func(text string) {
		if text != said {
			fmt.Fprintln(notes, text) //nolint:errcheck // notes may get lost
			said = text
		}
	}
	for e, err := range c.Events(ctx, id, 0) {
		switch {
		case err != nil:
			return nil, err
		case e.Comment != "":
			if q := queued(e.Comment); q != nil && !written {
				note("queued: " + place(q))
			}
		case e.Kind == job.EventToken:
			for chunk := range strings.Lines(string(e.Data)) {
				text := answerText([]byte(chunk))
				written = written || text != ""
				if _, err := io.WriteString(out, text); err != nil {
					return nil, fmt.Errorf("writing the answer: %w", err)
				}
			}
		case e.Kind == job.EventReset && written:
			if _, err := io.WriteString(out, "\n"); err != nil {
				return nil, fmt.Errorf("writing the answer: %w", err)
			}
			note("another worker begins the answer again:")
			written = false
		case e.Kind == job.EventGap:
			note("the beginning is not kept any more")
		case e.Kind == job.EventDone:
			if written {
				if _, err := io.WriteString(out, "\n"); err != nil {
					return nil, fmt.Errorf("writing the answer: %w", err)
				}
			}
			var j client.Job
			if err := json.Unmarshal(e.Data, &j); err != nil {
				return nil, fmt.Errorf("reading how %s ended: %w", id, err)
			}
			return &j, nil
		}
	}
	return nil, fmt.Errorf("the events of %s ended without its end", id)
}

// queued reads a keep-alive comment; nil if it does not say that the job waits.
func queued(comment string) *client.Queue {
	rest, ok := strings.CutPrefix(comment, "queued ")
	if !ok {
		return nil
	}
	var q client.Queue
	for word := range strings.FieldsSeq(rest) {
		name, value, _ := strings.Cut(word, "=")
		switch name {
		case "reason":
			q.Reason = value
		case "position":
			q.Position, _ = strconv.Atoi(value) // 0 is not shown
		case "eta":
			q.ETASeconds, _ = strconv.ParseFloat(value, 64) // 0 is not shown
		}
	}
	return &q
}

// verdict is nil for a completed job, else the error that says how it ended.
func verdict(j *client.Job) error {
	if j.Status == job.Completed || !j.Status.Ended() {
		return nil
	}
	if j.Error != nil {
		return &exitError{exitJob, fmt.Errorf("%s %s: %s (%s)", j.ID, j.Status, j.Error.Message, j.Error.CodeOf())}
	}
	return &exitError{exitJob, fmt.Errorf("%s %s", j.ID, j.Status)}
}
