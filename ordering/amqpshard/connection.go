package amqpshard

import (
	"context"
	"fmt"
	"net"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// closeTimeout bounds the handshake that closes a connection.
const closeTimeout = 5 * time.Second

// connection is an AMQP connection with access to its socket: closing that is
// the one way to end a call or a write that the broker does not answer.
type connection struct {
	*amqp.Connection
	socket net.Conn
}

// dial connects within cfg.DialTimeout. The error names the address, and the
// purpose is what the broker's list of connections shows.
func dial(ctx context.Context, cfg Config, purpose string) (*connection, error) {
	ctx, cancel := context.WithTimeout(ctx, cfg.DialTimeout)
	defer cancel()

	var socket net.Conn
	var unwatch func() bool
	properties := amqp.NewConnectionProperties()
	properties.SetClientConnectionName("watermill " + cfg.Group + " " + purpose)
	settings := amqp.Config{
		Properties: properties,
		Dial: func(network, address string) (net.Conn, error) {
			var err error
			if socket, err = new(net.Dialer).DialContext(ctx, network, address); err != nil {
				return nil, err
			}
			unwatch = context.AfterFunc(ctx, func() { _ = socket.Close() })
			return socket, nil
		},
	}
	if cfg.TLS != nil {
		settings.TLSClientConfig = cfg.TLS.Clone() // the client library writes to it
	}
	inner, err := amqp.DialConfig(cfg.URL, settings)
	if unwatch != nil && !unwatch() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		if socket != nil {
			_ = socket.Close()
		}
		if ctx.Err() != nil {
			err = ctx.Err() // else it is "use of closed network connection"
		}
		return nil, fmt.Errorf("amqpshard: connect to %s: %w", cfg.address(), err)
	}
	return &connection{Connection: inner, socket: socket}, nil
}

// abort ends the connection without a word to the broker. Everything that waits
// for it returns.
func (c *connection) abort() { _ = c.socket.Close() }

// close closes the connection, in bounded time. CloseDeadline does not bound it:
// the client library moves the deadline with each heartbeat that it receives.
func (c *connection) close() {
	defer time.AfterFunc(closeTimeout, c.abort).Stop()
	_ = c.Close() // it is gone, whatever the error
}

// abortOn makes the end of ctx abort the connection until stop is called.
func (c *connection) abortOn(ctx context.Context) (stop func() bool) {
	return context.AfterFunc(ctx, c.abort)
}
