// Package ordering keeps the events of one entity in order.
//
// A partition key ([KeyFunc], [StampKey]) sends all events of an entity through
// one shard of a [Broker], on RabbitMQ (package amqpshard) and Kafka (package
// kafkashard) alike. [Versions] refuses an event that is older than what its
// entity has already seen, in the handler's own SQL transaction, whatever the
// broker did to the order. [Sequence] is stricter: an event that comes before its
// predecessor is parked in the database, and released when the predecessor has
// been processed.
//
// A [Producer] numbers what it publishes, under a name and an epoch that outlive
// the process, and [Windows] remembers in the handler's transaction which numbers
// were seen: Kafka's idempotent producer, for brokers that have none and beyond
// one producer session.
//
// Keys are placed on shards by a [Partitioner], which [RecordPartitioning] keeps
// from changing unnoticed.
package ordering
