// Package ledger is for the effects of a handler that its database transaction
// can't undo: a payment, a shipping label, a mail.
package ledger
