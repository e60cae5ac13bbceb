package embedded_test

import (
	"errors"
	"net/url"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/millrace/millrace/internal/embedded"
)

func TestNATSLetsInWhoKnowsThePassword(t *testing.T) {
	t.Parallel()
	server, err := embedded.StartNATS(embedded.NATSConfig{Dir: t.TempDir(), Listen: "0.0.0.0:0", User: "millrace", Password: "open sesame"})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Shutdown()
	right, err := url.Parse(server.URL())
	if err != nil {
		t.Fatal(err)
	}
	if host := right.Hostname(); host != "127.0.0.1" {
		t.Errorf("this machine reaches it at %q", host)
	}
	with := func(user *url.Userinfo) string {
		u := *right
		u.User = user
		return u.String()
	}
	for name, test := range map[string]struct {
		url string
		ok  bool
	}{
		"the password":       {right.String(), true},
		"no password":        {with(nil), false},
		"another password":   {with(url.UserPassword("millrace", "sesame")), false},
		"another user":       {with(url.UserPassword("root", "open sesame")), false},
		"the user alone":     {with(url.User("millrace")), false},
		"the password alone": {with(url.UserPassword("", "open sesame")), false},
	} {
		nc, err := nats.Connect(test.url, nats.NoReconnect())
		if err == nil {
			nc.Close()
		}
		if test.ok && err != nil || !test.ok && !errors.Is(err, nats.ErrAuthorization) {
			t.Errorf("%s: %v", name, err)
		}
	}
	nc, err := nats.Connect(right.String(), nats.InProcessServer(server), nats.NoReconnect())
	if err != nil {
		t.Fatalf("in this process, with the password: %v", err)
	}
	nc.Close()
}
