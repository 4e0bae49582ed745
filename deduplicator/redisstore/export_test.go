package redisstore

// The circuit's clock can only be seen in a bubble, where no socket is.
type Circuit struct{ circuit }

func (c *Circuit) Closed() bool { return c.closed() }
func (c *Circuit) Failed()      { c.failed() }
func (c *Circuit) Succeeded()   { c.succeeded() }

const OpenFor = openFor
