package kubernetes

import (
	"fmt"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/millrace/millrace/internal/provider"
)

const (
	// costAnnotation is what a ReplicaSet's controller looks at when it chooses among pods that are ready, or among pods that are not: lower goes first.
	costAnnotation = "controller.kubernetes.io/pod-deletion-cost"
	templateLabel  = "pod-template-hash"
)

// pod is what is read of one.
type pod struct {
	metav1.ObjectMeta `json:"metadata"`

	Spec struct {
		NodeName string `json:"nodeName"`
	} `json:"spec"`
	Status struct {
		Phase                 string            `json:"phase"`
		Reason                string            `json:"reason"`
		Message               string            `json:"message"`
		Conditions            []condition       `json:"conditions"`
		InitContainerStatuses []containerStatus `json:"initContainerStatuses"`
		ContainerStatuses     []containerStatus `json:"containerStatuses"`
	} `json:"status"`
}

type condition struct {
	Type    string `json:"type"`
	Status  string `json:"status"`
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

type containerStatus struct {
	Name      string         `json:"name"`
	State     containerState `json:"state"`
	LastState containerState `json:"lastState"`
}

type containerState struct {
	Waiting    *detail `json:"waiting"`
	Terminated *detail `json:"terminated"`
}

type detail struct {
	Reason   string `json:"reason"`
	Message  string `json:"message"`
	ExitCode int    `json:"exitCode"`
}

// hopeless are the reasons for which a container waits that no waiting mends: somebody must change something, or its program ends again and again.
var hopeless = map[string]bool{
	"CrashLoopBackOff": true, "ImagePullBackOff": true, "ErrImagePull": true, "ErrImageNeverPull": true, "ImageInspectError": true, "InvalidImageName": true,
	"CreateContainerConfigError": true, "CreateContainerError": true, "RunContainerError": true,
}

func (p *pod) same(q *pod) bool { return p.UID == q.UID }

// ended: it will not run again.
func (p *pod) ended() bool { return p.Status.Phase == "Succeeded" || p.Status.Phase == "Failed" }

// active are the pods that count as a Deployment's replicas.
func active(pods []*pod) []*pod {
	var list []*pod
	for _, p := range pods {
		if !p.ended() && p.DeletionTimestamp == nil {
			list = append(list, p)
		}
	}
	return list
}

// severalTemplates: a rollout is under way, in which a Deployment spreads its replicas over several sets.
func severalTemplates(pods []*pod) bool {
	all := active(pods)
	for _, p := range all {
		if p.Labels[templateLabel] != all[0].Labels[templateLabel] {
			return true
		}
	}
	return false
}

func (p *pod) condition(name string) (condition, bool) {
	for _, c := range p.Status.Conditions {
		if c.Type == name {
			return c, true
		}
	}
	return condition{}, false
}

// ready is the highest rank.
const ready = 4

// rank orders pods as a ReplicaSet's controller does before it looks at their costs: the lowest goes first.
func (p *pod) rank() int {
	is, _ := p.condition("Ready")
	switch {
	case p.Spec.NodeName == "":
		return 0
	case p.Status.Phase == "Pending":
		return 1
	case p.Status.Phase == "Unknown":
		return 2
	case is.Status != "True":
		return 3
	default:
		return ready
	}
}

// goesFirst: once victim has the lowest cost, the controller takes none of the others before it.
func goesFirst(victim *pod, all []*pod) bool {
	for _, p := range all {
		if p.rank() < victim.rank() {
			return false
		}
	}
	return true
}

func (p *pod) cost() int64 {
	n, err := strconv.ParseInt(p.Annotations[costAnnotation], 10, 32)
	if err != nil { // none, or one that Kubernetes does not understand either
		return 0
	}
	return n
}

func (p *pod) instance() provider.Instance {
	state, reason := p.state()
	return provider.Instance{Name: p.Name, State: state, Created: p.CreationTimestamp.Time, Reason: oneLine(reason)}
}

// state of the pod, and why it is not running.
func (p *pod) state() (provider.State, string) {
	if p.DeletionTimestamp != nil {
		return provider.Stopping, ""
	}
	switch p.Status.Phase {
	case "Failed", "Succeeded", "Unknown":
		return provider.Failed, join(p.Status.Phase, p.Status.Reason, p.Status.Message)
	}
	waits := ""
	for _, list := range [][]containerStatus{p.Status.InitContainerStatuses, p.Status.ContainerStatuses} {
		for _, c := range list {
			switch {
			case c.State.Waiting != nil && hopeless[c.State.Waiting.Reason]:
				return provider.Failed, join("container "+c.Name, c.State.Waiting.Reason, c.lastWords())
			case c.State.Waiting != nil && waits == "":
				waits = join("container "+c.Name, c.State.Waiting.Reason, c.State.Waiting.Message)
			case c.State.Terminated != nil && c.State.Terminated.ExitCode != 0:
				waits = join("container "+c.Name+" is started again after it ended", c.State.Terminated.words())
			}
		}
	}
	if p.Status.Phase == "Running" {
		return provider.Running, ""
	}
	if c, ok := p.condition("PodScheduled"); ok && c.Status == "False" {
		return provider.Pending, join(c.Reason, c.Message)
	}
	return provider.Pending, waits
}

// lastWords is how the container ended the last time, or why it cannot start.
func (c *containerStatus) lastWords() string {
	if t := c.LastState.Terminated; t != nil {
		return "it ended with " + t.words()
	}
	return c.State.Waiting.Message
}

func (d *detail) words() string {
	return join(fmt.Sprintf("%s (exit code %d)", d.Reason, d.ExitCode), lastLine(d.Message))
}

func join(parts ...string) string {
	var said []string
	for _, s := range parts {
		if s != "" {
			said = append(said, s)
		}
	}
	return strings.Join(said, ": ")
}

// lastLine of a message that may be the end of a program's log.
func lastLine(s string) string {
	s = strings.TrimSpace(s)
	return s[strings.LastIndexByte(s, '\n')+1:]
}

// oneLine makes one of s, of 400 bytes at most.
func oneLine(s string) string {
	const most, more = 400, "…"
	s = strings.ToValidUTF8(strings.Join(strings.Fields(s), " "), "")
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most-len(more)], "") + more
}
