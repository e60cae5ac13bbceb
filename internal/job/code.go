package job

// Code is a stable, machine-readable name of what went wrong. Clients match on it, so codes are only ever added.
type Code string

// The codes.
const (
	CodeInvalidAPIKey        Code = "invalid_api_key"
	CodeInvalidValue         Code = "invalid_value"
	CodeInvalidType          Code = "invalid_type"
	CodeInvalidJSON          Code = "invalid_json"
	CodeMissingParameter     Code = "missing_required_parameter"
	CodeUnsupportedParameter Code = "unsupported_parameter"
	CodeUnknownURL           Code = "unknown_url"
	CodeMethodNotAllowed     Code = "method_not_allowed"
	CodeUnsupportedMedia     Code = "unsupported_media_type"
	CodeRequestTooLarge      Code = "request_too_large"
	CodeModelNotFound        Code = "model_not_found"
	CodeModelUnavailable     Code = "model_unavailable"
	CodeContextLength        Code = "context_length_exceeded"
	CodeIdempotencyConflict  Code = "idempotency_key_reused"
	CodeAlreadyEnded         Code = "job_already_ended"
	CodeJobNotFound          Code = "job_not_found"
	CodeWorkerNotFound       Code = "worker_not_found"
	CodeResultExpired        Code = "result_expired"
	CodeRateLimit            Code = "rate_limit_exceeded"
	CodeQueueFull            Code = "queue_full"
	CodeQueuedJobs           Code = "queued_jobs_limit"
	CodeQueuedBytes          Code = "queued_bytes_limit"
	CodeQueuedTokens         Code = "queued_tokens_limit"
	CodeTenantQueuedJobs     Code = "tenant_queued_jobs_limit"
	CodeTenantQueuedBytes    Code = "tenant_queued_bytes_limit"
	CodeTenantQueuedTokens   Code = "tenant_queued_tokens_limit"
	CodeModelQueuedJobs      Code = "model_queued_jobs_limit"
	CodeModelQueuedBytes     Code = "model_queued_bytes_limit"
	CodeModelQueuedTokens    Code = "model_queued_tokens_limit"
	CodeUnavailable          Code = "service_unavailable"
	CodeInternal             Code = "internal_error"
	CodeEngineError          Code = "engine_error"
	CodeEngineStalled        Code = "engine_stalled"
	CodeMaxAttempts          Code = "max_attempts"
	CodeWorkerCrashed        Code = "worker_crashed"
	CodeRunTimeout           Code = "run_timeout"
	CodeExpired              Code = "job_expired"
	CodeCancelled            Code = "job_cancelled"
	CodeClientGone           Code = "client_disconnected"

	// Of batches and files.
	CodeInvalidJSONLine      Code = "invalid_json_line"
	CodeDuplicateCustomID    Code = "duplicate_custom_id"
	CodeInvalidURL           Code = "invalid_url"
	CodeInvalidMethod        Code = "invalid_method"
	CodeStreamingUnsupported Code = "streaming_unsupported"
	CodeInvalidRequest       Code = "invalid_request"
	CodeInvalidEncoding      Code = "invalid_encoding"
	CodeTooManyTasks         Code = "too_many_tasks"
	CodeEmptyFile            Code = "empty_file"
	CodeTokenLimit           Code = "token_limit_exceeded"
	CodeBatchExpired         Code = "batch_expired"
	CodeBatchCancelled       Code = "batch_cancelled"
	CodeBatchNotFound        Code = "batch_not_found"
	CodeBatchEnded           Code = "batch_already_ended"
	CodeBatchNotEnded        Code = "batch_not_ended"
	CodeFileNotFound         Code = "file_not_found"
	CodeFileInUse            Code = "file_in_use"
	CodeResponseNotFound     Code = "response_not_found"

	// Of keys and their limits.
	CodePermissionDenied  Code = "permission_denied"
	CodeTenantNotFound    Code = "tenant_not_found"
	CodeTenantExists      Code = "tenant_already_exists"
	CodeTenantDeleted     Code = "tenant_deleted"
	CodeTenantInUse       Code = "tenant_in_use"
	CodeKeyNotFound       Code = "key_not_found"
	CodeKeyClosed         Code = "key_revoked_or_expired"
	CodeRequestsPerMinute Code = "requests_per_minute_limit"
	CodeTokensPerMinute   Code = "tokens_per_minute_limit"
	CodeRunning           Code = "running_limit"
	CodeRunningTokens     Code = "running_tokens_limit"
	CodeFileBytes         Code = "file_bytes_limit"

	// Of pools.
	CodePoolNotFound  Code = "pool_not_found"
	CodePoolExists    Code = "pool_already_exists"
	CodePoolFromFile  Code = "pool_from_file"
	CodeModelTaken    Code = "model_of_another_pool"
	CodeWorkloadTaken Code = "workload_of_another_pool"
)

// The types of errors, as the OpenAI API names them.
const (
	TypeInvalidRequest = "invalid_request_error"
	TypeRateLimit      = "rate_limit_exceeded"
	TypeServer         = "server_error"
)

// TypeOf is the type of an error that is told under an HTTP status.
func TypeOf(status int) string {
	switch {
	case status == 429:
		return TypeRateLimit
	case status >= 500:
		return TypeServer
	}
	return TypeInvalidRequest
}

// Error is what a client is told went wrong: all four keys always stand in its JSON.
type Error struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    *Code   `json:"code"`
}

// NewError returns an error without a param.
func NewError(typ string, code Code, message string) *Error {
	return &Error{Message: message, Type: typ, Code: &code}
}

// Error is the message.
func (e *Error) Error() string { return e.Message }

// CodeOf is e's code, "" if it has none.
func (e *Error) CodeOf() Code {
	if e == nil || e.Code == nil {
		return ""
	}
	return *e.Code
}

// LineError is what is wrong with one line of a batch's file, or, without a line, with all of it. Its JSON is what clients see.
type LineError struct {
	Code    Code    `json:"code"`
	Message string  `json:"message"`
	Param   *string `json:"param"`
	// Line is physical and counts from 1.
	Line *int64 `json:"line"`
}
