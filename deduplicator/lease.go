package deduplicator

import (
	"context"
	"crypto/rand"
	"errors"
	"time"
)

// lease keeps a task to one of the processes that could do it. It ends by itself, by
// the database's clock, when nobody renews it.
type lease struct {
	store   *SQLStore
	queries *leaseQueries
	name    string

	token   string
	renewed time.Time // no later than it was last renewed
}

// errLeaseLost says that another process has taken over, because this one was
// paused for longer than its lease.
var errLeaseLost = errors.New("another process has taken over")

func (l *lease) acquire(ctx context.Context) (bool, error) {
	l.token, l.renewed = rand.Text(), time.Now()
	if _, err := l.store.exec(ctx, l.queries.acquire, l.name, l.token); err != nil {
		return false, err
	}
	var n int
	err := l.store.db.QueryRowContext(ctx, l.queries.mine, l.name, l.token).Scan(&n)
	return n == 1, err
}

func (l *lease) renew(ctx context.Context) error {
	now := time.Now()
	result, err := l.store.exec(ctx, l.queries.renew, l.name, l.token)
	if err != nil {
		return err
	}
	if n, err := result.RowsAffected(); err != nil || n == 0 {
		return errors.Join(err, errLeaseLost)
	}
	l.renewed = now
	return nil
}

// release also works when ctx has ended.
func (l *lease) release(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), finishTimeout)
	defer cancel()
	_, err := l.store.exec(ctx, l.queries.release, l.name, l.token)
	return err
}

// leaseIsMine is a condition on the table of leases, for a name and a token.
const leaseIsMine = " WHERE consumer_name = ? AND token = ?"

type leaseQueries struct{ acquire, mine, renew, release string }

// newLeaseQueries returns those for leases of duration.
func newLeaseQueries(c *config, duration time.Duration) *leaseQueries {
	leases := c.dialect.Quote(c.leases)
	now, end := c.dialect.FromNow(0), c.dialect.FromNow(duration)
	acquire := "INSERT INTO " + leases + " AS l (consumer_name, token, expires_at) VALUES (?, ?, " + end + ")" +
		" ON CONFLICT (consumer_name) DO UPDATE SET token = excluded.token, expires_at = excluded.expires_at WHERE l.expires_at < " + now
	if c.dialect == MySQL {
		acquire = "INSERT INTO " + leases + " (consumer_name, token, expires_at) VALUES (?, ?, " + end + ") ON DUPLICATE KEY UPDATE" +
			" token = IF(expires_at < " + now + ", VALUES(token), token)," +
			" expires_at = IF(expires_at < " + now + ", VALUES(expires_at), expires_at)"
	}
	return &leaseQueries{
		acquire: c.dialect.Rebind(acquire),
		mine:    c.dialect.Rebind("SELECT COUNT(*) FROM " + leases + leaseIsMine),
		renew:   c.dialect.Rebind("UPDATE " + leases + " SET expires_at = " + end + leaseIsMine),
		release: c.dialect.Rebind("DELETE FROM " + leases + leaseIsMine),
	}
}
