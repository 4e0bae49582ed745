package amqpshard

import "time"

// ErrorOfDeclare is exported because a broker without the plugin can't be had in
// a test.
var ErrorOfDeclare = topologyError

// News tells for each time whether an interruption of one kind is logged then.
func News(times ...time.Time) []bool {
	s := subscription{interruptions: map[interruption]*repeats{}}
	news := make([]bool, len(times))
	for i, now := range times {
		news[i] = s.isNews(interruption{}, now)
	}
	return news
}
