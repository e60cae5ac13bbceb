package worker

import "time"

// lanePatience is how long a job of the worker's own lane stays in hand before it is looked whether another has room: what is in this one's cache is worth a short wait.
const lanePatience = 2 * time.Second
