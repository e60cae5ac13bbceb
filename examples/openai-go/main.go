// Openai-go talks to Millrace with OpenAI's own Go client: only the base URL and the key are Millrace's.
//
//	OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=any go run ./examples/openai-go
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "openai-go:", err)
		os.Exit(1) //nolint:gocritic // the signal handler needs no undoing in a process that ends
	}
}

func run(ctx context.Context) error {
	client := openai.NewClient(
		option.WithBaseURL(cmp.Or(os.Getenv("OPENAI_BASE_URL"), "http://127.0.0.1:8080/v1")),
		option.WithAPIKey(cmp.Or(os.Getenv("OPENAI_API_KEY"), "any")),
	)

	models, err := client.Models.List(ctx)
	if err != nil {
		return fmt.Errorf("listing the models: %w", err)
	}
	if len(models.Data) == 0 {
		return errors.New("no model is served yet: is a worker running?")
	}
	model := models.Data[0].ID
	fmt.Println("model: ", model)

	question := openai.ChatCompletionNewParams{
		Model:     model,
		Messages:  []openai.ChatCompletionMessageParamUnion{openai.UserMessage("Why is the sky blue?")},
		MaxTokens: openai.Int(48), // not every engine knows max_completion_tokens
	}
	chat, err := client.Chat.Completions.New(ctx, question)
	if err != nil {
		return fmt.Errorf("asking: %w", err)
	}
	fmt.Println("answer:", chat.Choices[0].Message.Content)

	fmt.Print("stream: ")
	stream := client.Chat.Completions.NewStreaming(ctx, question)
	for stream.Next() {
		for _, choice := range stream.Current().Choices {
			fmt.Print(choice.Delta.Content)
		}
	}
	fmt.Println()
	if err := stream.Err(); err != nil {
		return fmt.Errorf("streaming: %w", err)
	}

	vectors, err := client.Embeddings.New(ctx, openai.EmbeddingNewParams{
		Model: model,
		Input: openai.EmbeddingNewParamsInputUnion{OfArrayOfStrings: []string{"a mill", "a race"}},
	})
	// An error has its type: what went wrong is a field, not a text to search.
	var refused *openai.Error
	switch {
	case errors.As(err, &refused):
		fmt.Printf("vectors: none from this model (%d): %s\n", refused.StatusCode, refused.Message)
	case err != nil:
		return fmt.Errorf("embedding: %w", err)
	default:
		fmt.Printf("vectors: %d of %d numbers\n", len(vectors.Data), len(vectors.Data[0].Embedding))
	}

	_, err = client.Chat.Completions.New(ctx, openai.ChatCompletionNewParams{
		Model:    "no-such-model",
		Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("Hello?")},
	})
	if !errors.As(err, &refused) {
		return fmt.Errorf("asking a model that is not there: want an openai.Error, got: %w", err)
	}
	fmt.Printf("error:  %d %s: %s\n", refused.StatusCode, refused.Code, refused.Message)
	return nil
}
