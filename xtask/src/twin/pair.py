"""Two API servers, and the same request to both.

In: kubeconfigs, requests. Out: the answers, upstream's first. Both servers work at the same time: a request is
written to both before an answer is read. Invariant: nothing is retried but a request on an idle connection that
the server closed.
"""
import base64
import http.client
import json
import ssl
import tempfile

import yaml

LIMIT = 30


class Answer:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    def json(self):
        try:
            return json.loads(self.body)
        except ValueError:
            return None


class Side:
    """One server, with one kept connection, with or without the certificate of the administrator."""

    def __init__(self, kubeconfig, anonymous=False):
        with open(kubeconfig, encoding="utf-8") as file:
            config = yaml.safe_load(file)
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        host = cluster["server"].removeprefix("https://")
        # The address that a kubeconfig names is nobody's; the servers listen on the loopback address.
        self.host, port = "127.0.0.1", host.rsplit(":", 1)[1]
        self.port = int(port)
        # The certificate of a server is that of another name; both servers are on the loopback address.
        self.context = ssl._create_unverified_context()
        self.connection = None
        if anonymous:
            return
        with tempfile.NamedTemporaryFile() as file:
            for key in ("client-certificate-data", "client-key-data"):
                file.write(base64.b64decode(user[key]) + b"\n")
            file.flush()
            self.context.load_cert_chain(file.name)

    def connect(self):
        return http.client.HTTPSConnection(self.host, self.port, context=self.context, timeout=LIMIT)

    def write(self, request):
        self.request = request
        fresh = self.connection is None
        if fresh:
            self.connection = self.connect()
        try:
            self.emit()
        except OSError:
            self.connection.close()
            self.connection = None if fresh else self.connect()
            if not fresh:
                self.emit()

    def emit(self):
        method, target, headers, body = self.request
        self.connection.putrequest(method, target, skip_accept_encoding=True)
        for name, value in headers:
            self.connection.putheader(name, value.encode("utf-8"))
        if body is not None:
            self.connection.putheader("Content-Length", str(len(body)))
        self.connection.endheaders(body)

    def read(self):
        for attempt in (1, 2):
            try:
                answer = self.connection.getresponse()
                return Answer(answer.status, answer.getheaders(), answer.read())
            except (OSError, AttributeError, http.client.HTTPException) as error:
                self.connection = self.connect()
                if attempt == 2 or isinstance(error, TimeoutError):
                    return Answer(0, [], repr(error).encode())
                self.emit()

    def call(self, method, target, body=None, kind="application/json"):
        data = None if body is None else json.dumps(body).encode()
        self.write((method, target, [("Accept", "application/json"), ("Content-Type", kind)], data))
        return self.read()

    def watch(self, target, count, limit, accept="application/json"):
        """The first events of a watch, as JSON values; fewer if no more arrive in time."""
        connection = http.client.HTTPSConnection(self.host, self.port, context=self.context, timeout=limit)
        events = []
        try:
            connection.request("GET", target, headers={"Accept": accept})
            answer = connection.getresponse()
            if answer.status != 200:
                return [answer.status, json.loads(answer.read())]
            while len(events) < count:
                line = answer.readline()
                if not line:
                    break
                events.append(json.loads(line))
        except (OSError, ValueError):
            pass
        finally:
            connection.close()
        return events


class Pair:
    def __init__(self, theirs, ours):
        self.theirs, self.ours = Side(theirs), Side(ours)
        self.sides = (self.theirs, self.ours)
        self.anonymous = (Side(theirs, True), Side(ours, True))
        self.sent = 0

    def send(self, requests, anonymous=False):
        self.sent += 1
        sides = self.anonymous if anonymous else self.sides
        for side, request in zip(sides, requests):
            side.write(request)
        return [side.read() for side in sides]

    def both(self, method, target, body=None, kind="application/json"):
        """A request of the tool itself, which is not compared."""
        return [side.call(method, target, body, kind) for side in self.sides]
