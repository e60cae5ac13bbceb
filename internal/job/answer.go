package job

import (
	"encoding/json"
	"strings"
)

// AnswerText is the generated text of a whole answer's first choice, or of a response's messages, "" if it has none: what a reader of events has seen once it has seen them all.
func AnswerText(body []byte) string {
	var answer struct {
		Choices []struct {
			Index   int     `json:"index"`
			Text    *string `json:"text"`
			Message struct {
				Content *string `json:"content"`
			} `json:"message"`
		} `json:"choices"`
		Output []struct {
			Type    string `json:"type"`
			Content []struct {
				Type string `json:"type"`
				Text string `json:"text"`
			} `json:"content"`
		} `json:"output"`
	}
	if json.Unmarshal(body, &answer) != nil {
		return ""
	}
	for _, c := range answer.Choices {
		switch {
		case c.Index != 0:
		case c.Text != nil:
			return *c.Text
		case c.Message.Content != nil:
			return *c.Message.Content
		}
	}
	var text strings.Builder
	for _, o := range answer.Output {
		if o.Type != "message" {
			continue
		}
		for _, c := range o.Content {
			if c.Type == "output_text" {
				text.WriteString(c.Text)
			}
		}
	}
	return text.String()
}
