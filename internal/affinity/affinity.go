// Package affinity decides where a request's KV cache may still be: by its session, or by how it begins. Its decisions are pure; the bindings stand in the results store.
package affinity
