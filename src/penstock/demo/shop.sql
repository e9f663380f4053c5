-- The demo's shop: every row has a version that grows by one with each of its updates.

CREATE TABLE customers (
    id bigint PRIMARY KEY,
    name text NOT NULL,
    email text NOT NULL,
    points integer NOT NULL DEFAULT 0,
    version integer NOT NULL
);

CREATE TABLE orders (
    id bigint PRIMARY KEY,
    customer_id bigint NOT NULL,
    status text NOT NULL,
    items jsonb NOT NULL,
    total numeric(10, 2) NOT NULL,
    placed_at timestamptz NOT NULL DEFAULT now(),
    version integer NOT NULL
);
-- So that messages have in `changes` what an order was before.
ALTER TABLE orders REPLICA IDENTITY FULL;

CREATE TABLE payments (
    id bigint PRIMARY KEY,
    order_id bigint NOT NULL,
    method text NOT NULL,
    amount numeric(10, 2) NOT NULL,
    status text NOT NULL,
    version integer NOT NULL
);
