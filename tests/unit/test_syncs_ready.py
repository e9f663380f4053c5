"""The ready connectors, against servers that answer as the APIs document."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime

import pytest
from tests.loopback_api import Answer, Asked, LoopbackApi
from tests.sync_copy import Copy, made

from penstock.config.providers import READY
from penstock.syncs.connectors.contract import Json, Kind, Slice
from penstock.syncs.connectors.make import connector_of


@pytest.mark.parametrize("provider", READY)
def test_all_are_described(provider: str) -> None:
    names: Mapping[str, str] = {
        "instance": "x", "instance_url": "https://x.example", "username": "u", "password": "p",
        "client_id": "c", "client_secret": "s", "api_key": "k", "token": "t", "access_token": "a",
    }  # fmt: skip
    found = connector_of(provider, None, names)
    assert found.access.origin is not None
    assert found.access.origin.startswith("https://")
    assert found.access.auth is not None
    assert found.defaults.allowed_requests > 0


class GitHub:
    """Issues and pull requests: pages by Link, `since` for issues, and none for pull requests."""

    def __init__(self) -> None:
        self.issues: dict[int, Json] = {}

    def put(self, key: int, at: str, *, pull: bool = False) -> None:
        self.issues[key] = {
            "id": key, "updated_at": at, "created_at": "2026-01-01T00:00:00Z",
            **({"pull_request": {"url": "…"}} if pull else {}),
        }  # fmt: skip

    def __call__(self, asked: Asked) -> Answer:
        assert asked.headers["authorization"] == "Bearer t0"
        kind = asked.path.removeprefix("/repos/o/r/")
        assert (asked.query["state"], asked.query["per_page"]) == ("all", "100")
        found = list(self.issues.values())
        if kind == "pulls":
            assert "since" not in asked.query
            found = [each for each in found if "pull_request" in each]
        else:
            assert kind == "issues"
            found = [each for each in found if each["updated_at"] >= asked.query["since"]]
        found.sort(key=lambda each: each["updated_at"], reverse=asked.query["direction"] == "desc")
        page = int(asked.query.get("page", 1))
        rest = found[(page - 1) * 100 :]
        headers = {}
        if len(rest) > 100:
            query = "&".join(f"{k}={v}" for k, v in {**asked.query, "page": page + 1}.items())
            host = asked.headers["host"]
            headers["Link"] = f'<http://{host}{asked.path}?{query}>; rel="next", <x>; rel="last"'
        return Answer(rest[:100], headers=headers)


def test_github() -> None:
    github = GitHub()
    for key in range(250):
        github.put(key, f"2026-05-01T{key // 60:02}:{key % 60:02}:00Z", pull=key % 5 == 0)
    with LoopbackApi(github) as api:
        connector = made("github", api.url, token="t0", repository="o/r")
        issues, pulls = Copy(connector, "issues"), Copy(connector, "pull_requests")
        issues.job(Kind.BACKFILL)
        pulls.job(Kind.BACKFILL)
        assert (len(issues.records), len(pulls.records)) == (200, 50)
        github.put(1, "2026-05-02T00:00:00Z")
        github.put(5, "2026-05-02T00:00:01Z", pull=True)
        github.put(999, "2026-05-02T00:00:02Z")
        before = len(api.asked)
        issues.job(Kind.POLL)
        pulls.job(Kind.POLL)
        assert len(api.asked) - before == 2
        assert issues.alive()["1"]["updated_at"] == "2026-05-02T00:00:00Z"
        assert "999" in issues.records
        assert pulls.alive()["5"]["updated_at"] == "2026-05-02T00:00:01Z"
        del github.issues[2]
        swept = [record.upstream_id for page in issues.job(Kind.SWEEP) for record in page.records]
        assert issues.records.keys() - set(swept) == {"2"}


class ServiceNow:
    """The Table API: encoded queries of `^`, `>=`, `=` and ORDERBY, offset and limit."""

    def __init__(self) -> None:
        self.tables: dict[str, list[Json]] = {"incident": [], "sys_audit_delete": []}

    def __call__(self, asked: Asked) -> Answer:
        assert asked.headers["authorization"].startswith("Basic ")
        rows = self.tables[asked.path.removeprefix("/api/now/table/")]
        order: list[str] = []
        for part in asked.query["sysparm_query"].split("^"):
            if part.startswith("ORDERBY"):
                order.append(part.removeprefix("ORDERBY"))
            elif ">=" in part:
                name, value = part.split(">=")
                rows = [row for row in rows if row[name] >= value]
            else:
                name, value = part.split("=")
                rows = [row for row in rows if row[name] == value]
        rows = sorted(rows, key=lambda row: [row[name] for name in order])
        offset, limit = int(asked.query["sysparm_offset"]), int(asked.query["sysparm_limit"])
        return Answer({"result": rows[offset : offset + limit]})


def test_servicenow() -> None:
    now = ServiceNow()
    times = [f"2026-05-01 0{minute // 60}:{minute % 60:02}:00" for minute in range(200)]
    now.tables["incident"] = [
        {"sys_id": f"s{i:05}", "sys_updated_on": times[i // 20], "sys_created_on": times[0]}
        for i in range(2500)
        for _ in [0]
        if i // 20 < len(times)
    ]
    with LoopbackApi(now) as api:
        copy = Copy(made("servicenow", api.url, username="u", password="p"), "incident")
        copy.job(Kind.BACKFILL)
        assert len(copy.records) == 2500
        assert copy.records["s00000"].created_at == datetime(2026, 5, 1, tzinfo=UTC)
        gone = now.tables["incident"].pop(3)
        now.tables["sys_audit_delete"] = [
            {
                "tablename": "incident",
                "documentkey": gone["sys_id"],
                "sys_created_on": times[-1],
                "sys_id": "a",
            },
            {
                "tablename": "problem",
                "documentkey": "s00007",
                "sys_created_on": times[-1],
                "sys_id": "b",
            },
        ]
        now.tables["incident"][0]["sys_updated_on"] = times[-1]
        before = len(api.asked)
        copy.job(Kind.POLL)
        assert len(api.asked) - before <= 3
        copy.job(Kind.EVENTS)
        assert copy.alive() == {row["sys_id"]: row for row in now.tables["incident"]}
        assert copy.cursor == {"value": times[-1], "deletes": times[-1]}


class HubSpot:
    """The CRM: a search with one sort and 10,000 results, lists of archived objects, properties."""

    def __init__(self, most: int = 10_000) -> None:
        self.objects: dict[int, Json] = {}
        self.archived: dict[int, Json] = {}
        self.most = most

    def put(self, key: int, at: int) -> None:
        written = datetime.fromtimestamp(at / 1000, UTC).isoformat(timespec="milliseconds")
        self.objects[key] = {
            "id": str(key), "updatedAt": written.replace("+00:00", "Z"), "at": at,
            "createdAt": "2026-01-01T00:00:00.000Z", "properties": {"n": "1.10"}, "archived": False,
        }  # fmt: skip

    def __call__(self, asked: Asked) -> Answer:
        assert asked.headers["authorization"] == "Bearer t0"
        if asked.path == "/crm/v3/properties/contacts":
            return Answer({"results": [{"name": "n", "label": "N"}, {"name": "email"}]})
        after, limit = 0, 100
        if asked.method == "GET":
            assert (asked.path, asked.query["archived"]) == ("/crm/v3/objects/contacts", "true")
            found, after = list(self.archived.values()), int(asked.query.get("after", 0))
        else:
            assert asked.path == "/crm/v3/objects/contacts/search"
            body = asked.json
            assert body["properties"] == ["n", "email"]
            ((group,),) = ([each["filters"] for each in body["filterGroups"]],)
            assert (group[0]["propertyName"], group[0]["operator"]) == ("lastmodifieddate", "GTE")
            least = int(group[0]["value"])
            found = [each for each in self.objects.values() if each["at"] >= least]
            found.sort(key=lambda each: each["at"])
            after, limit = int(body.get("after", 0)), body["limit"]
            if after + limit > self.most:
                return Answer({"message": "paging is limited to 10,000"}, status=400)
        more = (
            {"paging": {"next": {"after": str(after + limit)}}}
            if after + limit < len(found)
            else {}
        )
        return Answer({"results": found[after : after + limit], **more})


def test_hubspot() -> None:
    hubspot = HubSpot(most=1_000)
    start = int(datetime(2026, 5, 1, tzinfo=UTC).timestamp() * 1000)
    for key in range(3_000):
        hubspot.put(key, start + key * 10)
    with LoopbackApi(hubspot) as api:
        copy = Copy(made("hubspot", api.url, access_token="t0"), "contacts")
        copy.job(Kind.BACKFILL)
        assert len(copy.records) == 3_000
        assert b'"n": "1.10"' in copy.records["7"].data
        hubspot.put(7, start + 10_000_000)
        hubspot.archived = {key: hubspot.objects.pop(key) for key in range(100, 350)}
        copy.job(Kind.POLL)
        copy.job(Kind.EVENTS)
        assert copy.alive() == {str(key): each for key, each in hubspot.objects.items()}


class Salesforce:
    """SOQL of one shape by queryAll, pages by nextRecordsUrl, describe and OAuth."""

    def __init__(self) -> None:
        self.rows: dict[str, Json] = {}
        self.queries: list[list[Json]] = []

    def put(self, key: str, minute: int, *, deleted: bool = False) -> None:
        at = f"2026-05-01T{minute // 60:02}:{minute % 60:02}:00.000+0000"
        self.rows[key] = {
            "attributes": {"type": "Contact"}, "Id": key, "SystemModstamp": at,
            "IsDeleted": deleted, "CreatedDate": at,
        }  # fmt: skip

    def __call__(self, asked: Asked) -> Answer:
        if asked.path == "/services/oauth2/token":
            assert b"grant_type=client_credentials" in asked.body
            return Answer({"access_token": "t0", "instance_url": "…"})
        assert asked.headers["authorization"] == "Bearer t0"
        path = asked.path.removeprefix("/services/data/v60.0/")
        if path == "sobjects":
            good = {"queryable": True, "replicateable": True, "deprecatedAndHidden": False}
            bad = {"name": "X", "queryable": False}
            found = [{"name": "Contact", **good}, {"name": "Rate__c", **good}, bad]
            return Answer({"sobjects": found})
        if path == "sobjects/contact/describe":
            names = ["Id", "SystemModstamp", "IsDeleted", "CreatedDate"]
            fields = [{"name": name, "type": "string"} for name in names]
            return Answer({"fields": [*fields, {"name": "MailingAddress", "type": "address"}]})
        if path.startswith("query/"):
            number, offset = path.removeprefix("query/").split("-")
            return self._page(int(number), int(offset))
        assert path == "queryAll"
        match = re.fullmatch(
            r"SELECT Id,SystemModstamp,IsDeleted,CreatedDate FROM contact "
            r"WHERE SystemModstamp >= (\S+) ORDER BY SystemModstamp, Id",
            asked.query["q"],
        )
        assert match is not None
        since = datetime.fromisoformat(match[1])
        found = [
            each
            for each in self.rows.values()
            if datetime.fromisoformat(each["SystemModstamp"]) >= since
        ]
        self.queries.append(sorted(found, key=lambda each: (each["SystemModstamp"], each["Id"])))
        return self._page(len(self.queries) - 1, 0)

    def _page(self, number: int, offset: int) -> Answer:
        if number >= len(self.queries):
            return Answer([{"errorCode": "INVALID_QUERY_LOCATOR", "message": "…"}], status=400)
        rows = self.queries[number]
        done = offset + 50 >= len(rows)
        more = (
            {} if done else {"nextRecordsUrl": f"/services/data/v60.0/query/{number}-{offset + 50}"}
        )
        return Answer(
            {"done": done, "totalSize": len(rows), "records": rows[offset : offset + 50], **more}
        )


def test_salesforce() -> None:
    salesforce = Salesforce()
    for i in range(220):
        salesforce.put(f"003{i:04}", i)
    with LoopbackApi(salesforce) as api:
        properties = {"instance_url": api.url, "client_id": "me", "client_secret": "hush"}
        connector = made("salesforce", api.url, **properties)
        copy = Copy(connector, "contact")
        assert list(connector.collections(copy.session)) == ["contact", "rate__c"]
        copy.job(Kind.BACKFILL)
        assert len(copy.records) == 220
        salesforce.put("0030003", 300, deleted=True)
        salesforce.put("0030004", 301)
        copy.job(Kind.POLL)
        alive = {key: each for key, each in salesforce.rows.items() if not each["IsDeleted"]}
        assert copy.alive() == alive
        # A place in a query lasts two days; behind that, the slice begins again.
        pages = copy.job(Kind.BACKFILL)
        salesforce.queries.clear()
        resumed = Slice(Kind.BACKFILL, {}, pages[0].resume)
        rest = list(connector.read(copy.collection, resumed, copy.session))
        assert len({each.upstream_id for page in rest for each in page.records}) == 220
