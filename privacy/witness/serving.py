"""The witness's daemon: C2SP's tlog-witness over HTTP, and nothing beside it but the last checkpoint of each log."""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
import time
from collections.abc import Callable

from aiohttp import web

from medsilo.privacy.errors import IdentityError, MedsiloError
from medsilo.privacy.files.durable import disk_error
from medsilo.privacy.identity.endpoint import split_address
from medsilo.privacy.identity.keys import load_audit_key
from medsilo.privacy.witness.book import Book, ConflictError, InconsistentError, UnknownLogError, UnsignedError
from medsilo.privacy.witness.config import WitnessConfig, WitnessTls
from medsilo.privacy.witness.protocol import LARGEST_REQUEST, PATH, SIZE_TYPE, AddCheckpoint, MalformedError

log = logging.getLogger(__name__)

_STATUS: tuple[tuple[type[MedsiloError], int], ...] = (
    (MalformedError, 400),
    (UnsignedError, 403),
    (UnknownLogError, 404),
    (ConflictError, 409),
    (InconsistentError, 422),
)
_READ_SECONDS = 20.0
_HEADERS = {"Server": "medsilo-witness", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def application(book: Book) -> web.Application:
    """The routes: ``POST /add-checkpoint``, and ``GET /checkpoint/ORIGIN`` for the last one, cosigned anew."""

    async def add(request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(_READ_SECONDS):
                data = await request.read()
        except TimeoutError:
            return web.Response(status=408, text="the request did not come to its end\n", headers=_HEADERS)
        try:
            asked = AddCheckpoint.read(data)
            line = await asyncio.to_thread(book.add, asked)
        except MedsiloError as error:
            return _refusal(error)
        except OSError as error:
            log.exception("nothing is cosigned that could not be kept")
            return web.Response(status=503, text=f"{disk_error(error, '') or 'the state is unusable'}\n")
        checkpoint = asked.checkpoint
        log.info("%s: cosigned over %d records", checkpoint.origin, checkpoint.size)
        return web.Response(text=f"{line}\n", headers=_HEADERS)

    async def last(request: web.Request) -> web.Response:
        try:
            return web.Response(text=await asyncio.to_thread(book.last, request.match_info["origin"]), headers=_HEADERS)
        except UnknownLogError as error:
            return _refusal(error)

    found = web.Application(client_max_size=LARGEST_REQUEST)
    found.add_routes([web.post(f"/{PATH}", add), web.get("/checkpoint/{origin:.+}", last)])
    return found


def _refusal(error: MedsiloError) -> web.Response:
    if isinstance(error, ConflictError):
        body = f"{error.size}\n".encode()
        log.warning("refused: %s", error)
        return web.Response(status=409, body=body, headers={**_HEADERS, "Content-Type": SIZE_TYPE})
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    if status in (403, 422):
        log.warning("refused: %s", error)
    return web.Response(status=status, text=f"{error}\n", headers=_HEADERS)


def serve(config: WitnessConfig, *, clock: Callable[[], float] = time.time) -> None:
    """Serves until a signal arrives. Raises ``MedsiloError`` if the address cannot be had, ``IdentityError`` for a key
    that cannot be used."""
    book = Book(config.state, config.name, load_audit_key(config.key), config.keys, clock)
    try:
        asyncio.run(_serve(config, book))
    finally:
        book.close()


async def _serve(config: WitnessConfig, book: Book) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    runner = web.AppRunner(application(book), access_log=None)
    await runner.setup()
    host, port = split_address(config.listen)
    context = None if config.tls is None else _context(config.tls)
    try:
        try:
            await web.TCPSite(runner, host, port, ssl_context=context).start()
        except OSError as error:
            raise MedsiloError(f"cannot listen on {config.listen}: {error.strerror}; change `listen:`") from None
        log.info("%s witnesses %d journals, listening on %s", config.name, len(book.origins), config.listen)
        await stopped.wait()
    finally:
        await runner.cleanup()


def _context(files: WitnessTls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(files.certificate, files.key)
    except (OSError, ssl.SSLError) as error:
        raise IdentityError(f"{files.certificate}, {files.key}: cannot be used: {error}") from None
    return context
