package amqpshard

// ErrorOfDeclare is exported because a broker without the plugin can't be had in
// a test.
var ErrorOfDeclare = topologyError
