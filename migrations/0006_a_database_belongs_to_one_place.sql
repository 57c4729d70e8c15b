-- Rows name the queue that they go back to, and queues of that name may stand in every
-- virtual host of every broker. So all rows belong to one place, which is written here by
-- the first instance that starts; an instance at another place does not start.
CREATE TABLE retry_place (
    -- There is one row.
    only_row BOOLEAN PRIMARY KEY DEFAULT TRUE CHECK (only_row),

    -- The name of the broker's cluster, the virtual host, and the intake queue (RETRY_QUEUE).
    broker TEXT NOT NULL,
    vhost TEXT NOT NULL,
    queue TEXT NOT NULL,

    -- The mark by which the broker is recognised whichever of its nodes answers: an exchange
    -- there has this id in its name.
    mark UUID NOT NULL,

    -- When, and by which instance or operator.
    taken_at TIMESTAMPTZ NOT NULL DEFAULT now(),
    taken_by TEXT NOT NULL
);
