package ledger_test

const childVariable = "LEDGER_CHILD"

func runChild(string) {}
