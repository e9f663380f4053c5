"""The demo's shop: writers that change customers, orders and payments at a steady rate.

Each writer owns its rows, so it knows every version without a query; after COMMIT has returned it
records in the ledger what the transaction did. Some transactions are rolled back: nothing of them may
arrive.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from importlib.resources import files
from typing import Any, Final, NamedTuple

import psycopg
from psycopg.types.json import Jsonb

from penstock.core.connect import Connection, connect
from penstock.demo.background import Background
from penstock.demo.ledger import DELETED, Change

TABLES: Final = ("customers", "orders", "payments")

_ITEMS = ("teapot", "kettle", "gaiwan", "sencha", "oolong", "matcha", "strainer", "tray")
_NAMES = ("Ada", "Björn", "Chidi", "Ewa", "Farid", "Ines", "José", "Mei", "Noor", "Zoë")
_METHODS = ("card", "transfer", "invoice")
_CAMPAIGN = 20
_MAX_DEBT = 0.5  # seconds; after a stall the writer catches up by no more than this

INSERT_CUSTOMER = "INSERT INTO customers (id, name, email, version) VALUES (%s, %s, %s, 1)"
INSERT_ORDER = (
    "INSERT INTO orders (id, customer_id, status, items, total, version)"
    " VALUES (%s, %s, 'placed', %s, %s, 1)"
)
INSERT_PAYMENT = (
    "INSERT INTO payments (id, order_id, method, amount, status, version)"
    " VALUES (%s, %s, %s, %s, 'pending', 1)"
)
# By id alone, so that the version in the row is Postgres's count and the ledger's is ours.
ADD_POINTS = (
    "UPDATE customers SET points = points + %s, version = version + 1 WHERE id = ANY(%s::bigint[])"
)
PAY = "UPDATE payments SET status = 'paid', version = version + 1 WHERE id = %s"
SHIP_ORDER = "UPDATE orders SET status = 'shipped', version = version + 1 WHERE id = %s"
DELETE_PAYMENT = "DELETE FROM payments WHERE id = %s"
DELETE_ORDER = "DELETE FROM orders WHERE id = %s"
DELETE_CUSTOMER = "DELETE FROM customers WHERE id = %s"


def create_tables(url: str) -> None:
    """Make the shop's tables."""
    with connect(url) as connection:
        connection.execute(files(__package__).joinpath("shop.sql").read_bytes())


class Cart(NamedTuple):
    """An order that is not paid yet, with its payment."""

    order: int
    payment: int


class Transaction(NamedTuple):
    """One transaction: its statements, and the changes it makes if it commits."""

    statements: list[tuple[str, tuple[Any, ...]]]
    changes: list[Change]
    rollback: bool = False


class Shop:
    """Makes up transactions over the rows of one writer; no I/O.

    Keys are `first`, `first + step`, ...: writers of one step and different `first` never meet.
    """

    def __init__(self, first: int, step: int, size: int, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a shop, not a secret
        self._next = first
        self._step = step
        self._size = size
        self._customers: dict[int, int] = {}  # id -> version
        self._regulars: list[int] = []
        self._newcomers: list[int] = []  # never ordered, so they may leave
        self._carts: list[Cart] = []

    def next(self) -> Transaction:
        """Return the next transaction; it must be carried out before the next call."""
        if len(self._regulars) + len(self._newcomers) < 5:
            return self._sign_up()
        kinds: list[tuple[int, Callable[[], Transaction]]] = [
            (12, self._sign_up),
            (35, self._check_out),
            (6, self._decline),
        ]
        if self._carts:
            kinds += [(27, self._settle), (10, self._cancel)]
        if self._newcomers:
            kinds.append((4, self._leave))
        if self._regulars:
            kinds.append((4, self._campaign))
        weights, kinds_of = zip(*kinds, strict=True)
        make: Callable[[], Transaction] = self._random.choices(kinds_of, weights)[0]
        return make()

    def _id(self) -> int:
        self._next += self._step
        return self._next - self._step

    def _sign_up(self) -> Transaction:
        transaction = Transaction([], [])
        for _ in range(self._size):
            key, name = self._id(), self._random.choice(_NAMES)
            transaction.statements.append(
                (INSERT_CUSTOMER, (key, name, f"{name.lower()}{key}@shop.test"))
            )
            transaction.changes.append(Change("customers", key, "insert", 1))
            self._customers[key] = 1
            self._newcomers.append(key)
        return transaction

    def _check_out(self) -> Transaction:
        transaction = Transaction([], [])
        for _ in range(self._size):
            if self._newcomers and (not self._regulars or self._random.random() < 0.3):
                self._regulars.append(self._newcomers.pop(0))
            customer, cart = self._random.choice(self._regulars), Cart(self._id(), self._id())
            self._place(transaction, cart, customer)
            self._customers[customer] += 1
            transaction.statements.append((ADD_POINTS, (1, [customer])))
            transaction.changes.append(
                Change("customers", customer, "update", self._customers[customer]),
            )
            self._carts.append(cart)
        return transaction

    def _place(self, transaction: Transaction, cart: Cart, customer: int) -> None:
        pick = self._random
        items = {pick.choice(_ITEMS): pick.randint(1, 4) for _ in range(pick.randint(1, 3))}
        total = f"{pick.randint(100, 99_999) / 100:.2f}"
        transaction.statements.append((INSERT_ORDER, (cart.order, customer, Jsonb(items), total)))
        transaction.changes.append(Change("orders", cart.order, "insert", 1))
        payment = (cart.payment, cart.order, pick.choice(_METHODS), total)
        transaction.statements.append((INSERT_PAYMENT, payment))
        transaction.changes.append(Change("payments", cart.payment, "insert", 1))

    def _decline(self) -> Transaction:
        transaction = Transaction([], [])
        self._place(transaction, Cart(self._id(), self._id()), self._id())
        return Transaction(transaction.statements, [], rollback=True)

    def _settle(self) -> Transaction:
        transaction = Transaction([], [])
        for cart in self._take(self._size):
            transaction.statements.append((PAY, (cart.payment,)))
            transaction.statements.append((SHIP_ORDER, (cart.order,)))
            transaction.changes.append(Change("payments", cart.payment, "update", 2))
            transaction.changes.append(Change("orders", cart.order, "update", 2))
        return transaction

    def _cancel(self) -> Transaction:
        transaction = Transaction([], [])
        for cart in self._take(self._size):
            transaction.statements.append((DELETE_PAYMENT, (cart.payment,)))
            transaction.statements.append((DELETE_ORDER, (cart.order,)))
            transaction.changes.append(Change("payments", cart.payment, "delete", DELETED))
            transaction.changes.append(Change("orders", cart.order, "delete", DELETED))
        return transaction

    def _take(self, count: int) -> list[Cart]:
        taken = []
        for _ in range(min(count, len(self._carts))):
            index = self._random.randrange(len(self._carts))
            self._carts[index], self._carts[-1] = self._carts[-1], self._carts[index]
            taken.append(self._carts.pop())
        return taken

    def _leave(self) -> Transaction:
        key = self._newcomers.pop()
        del self._customers[key]
        return Transaction(
            [(DELETE_CUSTOMER, (key,))], [Change("customers", key, "delete", DELETED)]
        )

    def _campaign(self) -> Transaction:
        count = min(_CAMPAIGN * self._size, len(self._regulars))
        chosen = self._random.sample(self._regulars, count)
        transaction = Transaction([(ADD_POINTS, (10, chosen))], [])
        for customer in chosen:
            self._customers[customer] += 1
            transaction.changes.append(
                Change("customers", customer, "update", self._customers[customer])
            )
        return transaction


Committed = Callable[[list[Change], float], None]
"""Called with a transaction's changes and the time (`perf_counter`) when its COMMIT returned."""


class Writer(Background):
    """Writes one `Shop` at `rate` row changes a second; at its end every transaction is recorded."""

    def __init__(self, url: str, committed: Committed, shop: Shop, rate: float) -> None:
        super().__init__("writer")
        self._url = url
        self._committed = committed
        self._shop = shop
        self._rate = rate
        self.error: Exception | None = None

    def run(self) -> None:
        """Write until `stop`, or an error."""
        try:
            with connect(self._url) as connection:
                self._write(connection)
        except (psycopg.Error, OSError) as error:
            self.error = error

    def _write(self, connection: Connection) -> None:
        due = time.perf_counter()
        while not self._stopping.wait(max(0.0, due - time.perf_counter())):
            transaction = self._shop.next()
            # The pipeline makes it one round trip; it is left last, when COMMIT has been answered.
            with (
                connection.pipeline(),
                connection.transaction(force_rollback=transaction.rollback),
            ):
                for statement, params in transaction.statements:
                    connection.execute(statement.encode(), params)
            now = time.perf_counter()
            if not transaction.rollback:
                self._committed(transaction.changes, now)
                due += len(transaction.changes) / self._rate
            due = max(due, now - _MAX_DEBT)


def write_first(url: str, committed: Committed) -> None:
    """Commit one row of a key that no writer uses: what shows that the whole way is open."""
    key = 0
    with connect(url) as connection:
        connection.execute(INSERT_CUSTOMER, (key, "Zero", "zero@shop.test"))
    committed([Change("customers", key, "insert", 1)], time.perf_counter())


def open_shop(url: str, committed: Committed, rate: int) -> list[Writer]:
    """Return the writers that together make `rate` row changes a second, not yet started."""
    count = 2  # so that transactions interleave in the WAL
    size = max(1, round(rate / 1000))  # beyond that, more rows a transaction
    return [
        Writer(url, committed, Shop(first, count, size, seed=first), rate / count)
        for first in range(1, count + 1)
    ]
