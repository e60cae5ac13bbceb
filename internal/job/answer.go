package job

import "encoding/json"

// AnswerText is the generated text of a whole answer's first choice, "" if it has none: what a reader of events has seen once it has seen them all.
func AnswerText(body []byte) string {
	var answer struct {
		Choices []struct {
			Index   int     `json:"index"`
			Text    *string `json:"text"`
			Message struct {
				Content *string `json:"content"`
			} `json:"message"`
		} `json:"choices"`
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
	return ""
}
