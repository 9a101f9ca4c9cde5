"""A live page about a party's own files: who may see it, and how it stays up to date.

The page is drawn on this machine as plain HTML and SVG, and works without a script; with one, a line from the server
says when there is something new, and the page fetches its middle again. Nothing comes from anywhere else, and nothing
is sent on: ``Content-Security-Policy`` holds browsers to that.

Whoever wants to see it shows a certificate of the federation with the role ``operator``, or signs in with the page's
token.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import secrets
import signal
import ssl
import stat
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from aiohttp import web

from medsilo.privacy.errors import ConfigurationError, IdentityError, MedsiloError
from medsilo.privacy.files.durable import write_atomically
from medsilo.privacy.identity.revocation import LiveCredentials

log = logging.getLogger(__name__)

_SESSION_SECONDS = 12 * 3600
_MOST_SESSIONS = 100
_MOST_WATCHERS = 50
_LOOK_SECONDS = 1.0
_TOKEN_LENGTH = 32
_COOKIE = "medsilo-page"
_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Server": "medsilo",
}
_STATIC = {"live.css": "text/css", "live.js": "text/javascript"}

Query = Mapping[str, str]


@dataclass(frozen=True)
class Content:
    """What a page shows: ``template`` draws ``data``, which machines get as JSON. ``metrics``: for Prometheus."""

    title: str
    template: str
    look: Callable[[Query], dict[str, Any]]
    metrics: Callable[[], bytes]
    actions: Mapping[str, Callable[[], str]] = field(default_factory=dict)


def open_token(path: Path) -> str:
    """The page's token, made if there is none; a line in a file that nobody else may read.

    Raises ``IdentityError`` if others may read it, ``ConfigurationError`` if it is too short to be safe.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(path, (secrets.token_urlsafe(_TOKEN_LENGTH) + "\n").encode(), mode=0o600)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise IdentityError(f"{path}: others can read this token; run `chmod 600 {path}`")
    token = path.read_text(encoding="utf-8").strip()
    if len(token) < _TOKEN_LENGTH:
        raise ConfigurationError(
            f"{path}: a page's token should have {_TOKEN_LENGTH} characters at least; delete the file"
        )
    return token


def tls_context(*, certificate: Path, key: Path, ca: Path) -> ssl.SSLContext:
    """TLS 1.3 that asks for a client's certificate, and also lets in who has none: to the sign-in."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(certificate, key)
        context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        raise IdentityError(f"{certificate}, {key}, {ca}: cannot be used for the page: {error}") from None
    context.verify_mode = ssl.CERT_OPTIONAL
    return context


class PageServer:
    """Serves one page.

    ``credentials``: the party's, by whose CA operators are let in; none without them. ``hosts``: names (with port)
    under which the page may be asked for, where another name in its place is an attack (a page on loopback).
    """

    def __init__(
        self,
        content: Content,
        templates: jinja2.BaseLoader,
        *,
        token: str,
        credentials: LiveCredentials | None = None,
        hosts: frozenset[str] = frozenset(),
    ) -> None:
        self._content = content
        self._token = token
        self._credentials = credentials
        self._hosts = hosts
        self._sessions: dict[str, float] = {}
        self._said: dict[str, str] = {}
        """What an action said, by session, until the page has shown it."""
        self._watchers = 0
        self._drawn: dict[tuple[tuple[str, str], ...], tuple[float, asyncio.Task[tuple[str, str]]]] = {}
        self._environment = jinja2.Environment(
            loader=jinja2.ChoiceLoader([templates, jinja2.PackageLoader("medsilo.privacy.party")]),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._static = {name: self._environment.get_template(name).render() for name in _STATIC}

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[self._guard], client_max_size=16 * 1024)
        app.add_routes(
            [
                web.get("/", self._page),
                web.get("/middle", self._middle),
                web.get("/changes", self._changes),
                web.get("/data.json", self._data),
                web.get("/metrics", self._metrics),
                web.post("/sign-in", self._sign_in),
                web.post("/sign-out", self._sign_out),
                *(web.get(f"/{name}", self._file) for name in _STATIC),
                *(web.post(f"/do/{name}", self._act) for name in self._content.actions),
            ]
        )
        return app

    def serve(self, host: str, port: int, context: ssl.SSLContext | None, ready: Callable[[], None]) -> None:
        """Serves until SIGTERM or Ctrl-C; ``ready`` is called once the page can be opened.

        Raises ``ConfigurationError`` if the address cannot be had.
        """
        asyncio.run(self._until_stopped(host, port, context, ready))

    async def _until_stopped(
        self, host: str, port: int, context: ssl.SSLContext | None, ready: Callable[[], None]
    ) -> None:
        serving = asyncio.ensure_future(self._run(host, port, context, ready))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
        try:
            await serving
        except asyncio.CancelledError:
            return

    async def _run(self, host: str, port: int, context: ssl.SSLContext | None, ready: Callable[[], None]) -> None:
        """Serves until it is cancelled. Raises ``ConfigurationError`` if the address cannot be had."""
        runner = web.AppRunner(self.application(), access_log=None, shutdown_timeout=2)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, ssl_context=context).start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigurationError(f"{host}:{port}: cannot be listened on: {error.strerror or error}") from None
        ready()
        try:
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        open_to_all = request.path.lstrip("/") in (*_STATIC, "sign-in")
        try:
            if self._hosts and request.host not in self._hosts:
                response: web.StreamResponse = web.Response(
                    status=421, text="this page is not served under that name\n"
                )
            elif request.method == "POST" and not _same_origin(request):
                response = web.Response(status=403, text="this form was not sent from this page\n")
            elif open_to_all or self._may_look(request):
                response = await handler(request)
            elif request.path == "/" and request.query.get("token"):
                response = self._begin_session(request, request.query["token"])
            else:
                response = self._ask_for_token(request, status=401)
        except MedsiloError as error:
            response = web.Response(status=503, text=f"{error}\n")
        except web.HTTPException as ending:
            response = web.Response(status=ending.status, text=f"{ending.reason}\n")
        if not response.prepared:
            response.headers.update(_HEADERS)
        return response

    def _may_look(self, request: web.Request) -> bool:
        now = time.monotonic()
        if self._sessions.get(_digest(request.cookies.get(_COOKIE, "")), 0.0) > now:
            return True
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        if kind == "Bearer" and self._is_token(given):
            return True
        tls = request.transport.get_extra_info("ssl_object") if request.transport else None
        certificate = tls.getpeercert(binary_form=True) if tls is not None else None
        if certificate is None or self._credentials is None:
            return False
        try:
            identity = self._credentials.identify(ssl.DER_cert_to_PEM_cert(certificate).encode())
        except IdentityError:
            return False
        return identity.role == "operator"

    def _session(self, request: web.Request) -> str:
        """The session's name; empty for who comes without one, with the token or a certificate."""
        session = _digest(request.cookies.get(_COOKIE, ""))
        return session if session in self._sessions else ""

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())

    def _begin_session(self, request: web.Request, given: str) -> web.Response:
        if not self._is_token(given.strip()):
            log.warning("sign-in refused from %s", request.remote)
            return self._ask_for_token(request, status=403)
        now = time.monotonic()
        self._sessions = {key: until for key, until in self._sessions.items() if until > now}
        while len(self._sessions) >= _MOST_SESSIONS:
            del self._sessions[min(self._sessions, key=self._sessions.__getitem__)]
        session = secrets.token_urlsafe(32)
        self._sessions[_digest(session)] = now + _SESSION_SECONDS
        response = web.Response(status=303, headers={"Location": "/"})
        response.set_cookie(
            _COOKIE,
            session,
            max_age=_SESSION_SECONDS,
            httponly=True,
            secure=request.secure,
            samesite="Strict",
            path="/",
        )
        return response

    def _ask_for_token(self, request: web.Request, *, status: int) -> web.Response:
        if "text/html" not in request.headers.get("Accept", ""):
            return web.Response(
                status=status, text="sign in: a certificate of an operator, or Authorization: Bearer TOKEN\n"
            )
        text = self._environment.get_template("sign_in.html").render(title=self._content.title, wrong=status == 403)
        return web.Response(status=status, text=text, content_type="text/html")

    async def _sign_in(self, request: web.Request) -> web.Response:
        return self._begin_session(request, str((await request.post()).get("token", "")))

    async def _sign_out(self, request: web.Request) -> web.Response:
        self._sessions.pop(_digest(request.cookies.get(_COOKIE, "")), None)
        response = web.Response(status=303, headers={"Location": "/"})
        response.del_cookie(_COOKIE, path="/")
        return response

    async def _page(self, request: web.Request) -> web.Response:
        middle, digest = await self._draw(request.query)
        text = self._environment.get_template("live.html").render(
            title=self._content.title,
            middle=middle,
            digest=digest,
            query=request.query_string,
            said=self._said.pop(self._session(request), ""),
        )
        return web.Response(text=text, content_type="text/html")

    async def _middle(self, request: web.Request) -> web.Response:
        middle, digest = await self._draw(request.query)
        return web.Response(text=middle, content_type="text/html", headers={"ETag": f'"{digest}"'})

    async def _data(self, request: web.Request) -> web.Response:
        data = await asyncio.to_thread(self._content.look, dict(request.query))
        return web.json_response(data, dumps=lambda found: json.dumps(found, indent=2))

    async def _metrics(self, _request: web.Request) -> web.Response:
        text = await asyncio.to_thread(self._content.metrics)
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _file(self, request: web.Request) -> web.Response:
        name = request.path.lstrip("/")
        return web.Response(text=self._static[name], content_type=_STATIC[name])

    async def _act(self, request: web.Request) -> web.Response:
        said = await asyncio.to_thread(self._content.actions[request.path.removeprefix("/do/")])
        self._drawn.clear()
        log.info("%s: %s", request.path, said)
        self._said[self._session(request)] = said
        return web.Response(status=303, headers={"Location": "/"})

    async def _changes(self, request: web.Request) -> web.StreamResponse:
        """One line whenever the page's middle is another one (server-sent events)."""
        if self._watchers >= _MOST_WATCHERS:
            return web.Response(status=503, text="too many open pages\n")
        response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        self._watchers += 1
        known = request.query.get("digest", "")
        query = {key: value for key, value in request.query.items() if key != "digest"}
        quiet = 0.0
        try:
            while self._may_look(request):
                _, digest = await self._draw(query)
                if digest != known:
                    known, quiet = digest, 0.0
                    await response.write(f"data: {digest}\n\n".encode())
                elif quiet >= 15:
                    quiet = 0.0
                    await response.write(b": still here\n\n")  # a reader that has gone is noticed
                await asyncio.sleep(_LOOK_SECONDS)
                quiet += _LOOK_SECONDS
        except ConnectionError:
            pass
        finally:
            self._watchers -= 1
        return response

    async def _draw(self, query: Query) -> tuple[str, str]:
        """The page's middle and its digest; one drawing serves all who ask within a second."""
        now, asked = time.monotonic(), tuple(sorted(query.items()))
        self._drawn = {
            key: (began, task)
            for key, (began, task) in self._drawn.items()
            if now - began < _LOOK_SECONDS or not task.done()
        }
        if asked not in self._drawn:
            self._drawn[asked] = (now, asyncio.ensure_future(self._draw_anew(dict(query))))
        return await asyncio.shield(self._drawn[asked][1])

    async def _draw_anew(self, query: Query) -> tuple[str, str]:
        data = await asyncio.to_thread(self._content.look, query)
        middle = await asyncio.to_thread(self._environment.get_template(self._content.template).render, **data)
        return middle, hashlib.sha256(middle.encode()).hexdigest()[:16]


def _digest(session: str) -> str:
    return hashlib.sha256(session.encode()).hexdigest()


def _same_origin(request: web.Request) -> bool:
    """Whether a form was sent from this page, as browsers say; other programs say nothing, and need the token."""
    origin = request.headers.get("Origin")
    return origin is None or origin.partition("://")[2] == request.host
