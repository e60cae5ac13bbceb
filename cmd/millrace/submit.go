package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/telemetry"
)

// maxPrompt bounds what is read from the standard input, in bytes.
const maxPrompt = 16 << 20

func newSubmit(p *program) *cobra.Command {
	var (
		conn                       clientFlags
		out                        output
		model, class, session, key string
		wait, stream, async        bool
		maxTokens                  int
		deadline                   time.Duration
	)
	cmd := &cobra.Command{
		Use: "submit [PROMPT]", Short: "Ask a model something, as a durable job",
		Long: `Put a prompt on the queue as a durable job, wait for its answer and print it.
Without PROMPT, or with "-", the prompt is read from the standard input.

Ctrl-C ends the waiting and not the job. The exit code is 0 if the job completed,
3 if it ended otherwise.`,
		Example: `  millrace submit "Why is the sky blue?"
  millrace submit --stream -m llama3.2:1b "Tell me a story"
  millrace submit --async --priority batch < report.txt`,
		Args: args(0, 1, "PROMPT"),
		RunE: func(cmd *cobra.Command, given []string) error {
			if stream && async || wait && (stream || async) {
				return usageError(cmd, errors.New("--wait, --stream and --async exclude each other"))
			}
			prompt, err := readPrompt(p.in, given)
			if err != nil {
				return usageError(cmd, err)
			}
			if _, err := job.ParseClass(class); err != nil {
				return usageError(cmd, err)
			}
			if err := config.AtLeast("max-tokens", maxTokens, 0); err != nil {
				return usageError(cmd, err)
			}
			c, err := conn.open()
			if err != nil {
				return err
			}
			s := client.Submission{Priority: job.Class(class), Session: job.Session(session), Key: key}
			if deadline > 0 {
				s.Deadline = deadline.String()
			}
			return explain(c, submit(cmd.Context(), p, c, s, prompt, job.Model(model), maxTokens, stream, async, out))
		},
	}
	f := cmd.Flags()
	f.StringVarP(&model, "model", "m", "", "`model` to ask (default the only one served)")
	f.BoolVar(&wait, "wait", false, "wait for the whole answer, and print it (the default)")
	f.BoolVar(&stream, "stream", false, "print the answer while it is written")
	f.BoolVar(&async, "async", false, "print the job's id and do not wait")
	f.IntVar(&maxTokens, "max-tokens", 0, "most `tokens` of the answer; 0 leaves it to the engine")
	f.StringVar(&class, "priority", string(job.Standard), "interactive, standard or batch")
	f.StringVar(&session, "session", "", "affinity `key`: prompts of one session go to one worker, which has their beginning cached")
	f.DurationVar(&deadline, "deadline", 0, "when the job expires, from now; 0 is the server's default")
	f.StringVar(&key, "idempotency-key", "", "submit no second job under the same `key`")
	conn.add(f)
	out.add(f)
	return cmd
}

func readPrompt(in io.Reader, given []string) (string, error) {
	if len(given) == 1 && given[0] != "-" {
		if strings.TrimSpace(given[0]) == "" {
			return "", errors.New("PROMPT is empty")
		}
		return given[0], nil
	}
	if len(given) == 0 && telemetry.Terminal(in) {
		return "", errors.New("PROMPT is missing, and nothing is piped in")
	}
	raw, err := io.ReadAll(io.LimitReader(in, maxPrompt+1))
	switch {
	case err != nil:
		return "", fmt.Errorf("reading the prompt: %w", err)
	case len(raw) > maxPrompt:
		return "", fmt.Errorf("the prompt is longer than %d bytes", maxPrompt)
	case strings.TrimSpace(string(raw)) == "":
		return "", errors.New("the prompt on the standard input is empty")
	}
	return string(raw), nil
}

func submit(ctx context.Context, p *program, c *client.Client, s client.Submission, prompt string, model job.Model, maxTokens int, stream, async bool, out output) error {
	if model == "" {
		var err error
		if model, err = onlyModel(ctx, c); err != nil {
			return err
		}
	}
	type turn struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	body, err := json.Marshal(struct {
		Model     job.Model `json:"model"`
		Messages  []turn    `json:"messages"`
		MaxTokens int       `json:"max_tokens,omitempty"`
	}{model, []turn{{"user", prompt}}, maxTokens})
	if err != nil {
		return fmt.Errorf("writing the request: %w", err)
	}
	s.Body, s.Stream = body, &stream
	j, err := c.Submit(ctx, s)
	if err != nil {
		return err
	}
	if async {
		if out.json() {
			return printJSON(p.out, j)
		}
		_, err := fmt.Fprintln(p.out, j.ID)
		return err
	}
	id, stream := j.ID, stream && !out.json()
	if stream {
		j, err = follow(ctx, c, id, p.out, p.err)
	} else {
		j, err = c.Wait(ctx, id)
	}
	if err != nil {
		if ctx.Err() != nil {
			fmt.Fprintf(p.err, "\n%s goes on: `millrace jobs watch %s` follows it, `millrace jobs cancel %s` ends it\n", id, id, id) //nolint:errcheck // nowhere else to say it
		}
		return err
	}
	return printAnswer(p.out, j, out, stream)
}

// printAnswer prints an ended job's answer, unless it was printed as it came.
func printAnswer(w io.Writer, j *client.Job, out output, streamed bool) error {
	if out.json() {
		if err := printJSON(w, j); err != nil {
			return err
		}
		return verdict(j)
	}
	if err := verdict(j); err != nil || streamed {
		return err
	}
	text := ""
	if j.Result != nil {
		if text = answerText(j.Result.Body); text == "" {
			text = string(j.Result.Body)
		}
	}
	_, err := fmt.Fprintln(w, text)
	return err
}
