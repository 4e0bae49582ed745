module github.com/seed-2f56a981/watermill-idempotent/examples

go 1.26.0

require github.com/seed-2f56a981/watermill-idempotent v0.0.0

replace github.com/seed-2f56a981/watermill-idempotent => ../
