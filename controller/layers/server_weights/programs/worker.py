"""Brings files of a model by one way. Started and watched by ``weights.py``, which may kill it at any moment.

    python worker.py ways           prints the ways through huggingface_hub that there are here
    python worker.py work <ORDER    JSON lines on standard output: fetched and at, wait and by, trouble, fatal

Standard library only, but for the ways that are huggingface_hub's own. Ranged requests go on where a part ends, over
the end of this process too; huggingface_hub begins a file anew with each process (from 1.18 on).
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import email.utils
import errno
import http.client
import importlib.util
import json
import os
import signal
import ssl
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

FILES_AT_ONCE = 8
TIMEOUT = 30.0  # seconds without a byte until a connection is given up
TRIES = 6  # without a byte in between
PIECE = 1 << 20

_out = threading.Lock()


def say(**what: Any) -> None:
    """Tell the one who watches."""
    with _out:
        print(json.dumps(what), flush=True)


class Fatal(Exception):  # noqa: N818 - it is how a way ends
    """No way will bring it: the message says why and what to do."""


class Trouble(Exception):  # noqa: N818 - it is how a try ends
    """It does not come this way now."""


def main() -> None:
    """Do what the command line says."""
    if sys.argv[1] == "ways":
        print(" ".join(hub_ways()))
        return
    # Who watches may be killed where nothing tells us.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    order = json.load(sys.stdin)
    bring = {"ranged": ranged, "peer": ranged, "xet": through_hub, "hub": through_hub}[order["way"]]
    with concurrent.futures.ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        jobs = [pool.submit(bring, order, file) for file in order["files"]]
        for job in concurrent.futures.as_completed(jobs):
            try:
                job.result()
            except Fatal as error:
                say(fatal=str(error))
                os._exit(1)
            except Trouble as error:
                say(trouble=str(error))
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    say(fatal=f"no space left: {error}")
                    os._exit(1)
                say(trouble=str(error))


# --- ranged requests ---


class SameHost(urllib.request.HTTPRedirectHandler):
    """Follows redirects, and shows the token to nobody but the host that it is for."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """The request that follows; urllib would take all headers along."""
        made = super().redirect_request(req, fp, code, msg, headers, newurl)
        if made is not None and urllib.parse.urlsplit(newurl)[:2] != urllib.parse.urlsplit(req.full_url)[:2]:
            made.remove_header("Authorization")
        return made


def opener() -> urllib.request.OpenerDirector:
    """What opens URLs. Python builds of their own may not find the system's certificates."""
    context = ssl.create_default_context()
    if not context.cert_store_stats()["x509_ca"]:
        for path in ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt"):
            if os.path.exists(path):
                context.load_verify_locations(path)
    return urllib.request.build_opener(SameHost, urllib.request.HTTPSHandler(context=context))


def ranged(order: dict[str, Any], file: dict[str, Any]) -> None:
    """Bring one file, from where its part ends."""
    part = os.path.join(order["aside"], "parts", file["path"])
    os.makedirs(os.path.dirname(part), exist_ok=True)
    open_url = opener()
    failures = 0
    while True:
        there = os.path.getsize(part) if os.path.exists(part) else 0
        if there == file["size"]:
            if not there:
                open(part, "wb").close()
            say(fetched=file["path"], at=part)
            return
        if there > file["size"]:
            os.unlink(part)
            continue
        try:
            more(order, file, part, there, open_url)
            failures = 0
        except Trouble:
            if os.path.exists(part) and os.path.getsize(part) > there:
                failures = 0
            failures += 1
            if failures >= (2 if order["way"] == "peer" else TRIES):
                raise
            time.sleep(min(2.0 ** (failures - 1), 30.0))


def more(order: dict[str, Any], file: dict[str, Any], part: str, there: int, open_url: Any) -> None:
    """Ask for what is missing of a file, and write it down as it comes. Raises Trouble, Fatal."""
    request, who = asked(order, file)
    request.add_header("Accept-Encoding", "identity")
    if there:
        request.add_header("Range", f"bytes={there}-")
    try:
        with open_url.open(request, timeout=TIMEOUT) as answer:
            begins = begins_at(answer, file["size"], there)
            with open(part, "r+b" if begins else "wb") as target:
                target.seek(begins)
                target.truncate()
                left = file["size"] - begins
                while left:
                    # As it comes: what is in a buffer is lost with the process.
                    piece = answer.read1(min(PIECE, left))
                    if not piece:
                        raise Trouble(f"{who} cut {file['path']} off")
                    target.write(piece)
                    target.flush()
                    left -= len(piece)
    except urllib.error.HTTPError as error:
        refused(error, order, file, who, part)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise Trouble(f"{who}: {file['path']}: {error}") from None
    except http.client.HTTPException as error:
        raise Trouble(f"{who}: {file['path']}: {error!r}") from None


def asked(order: dict[str, Any], file: dict[str, Any]) -> tuple[urllib.request.Request, str]:
    """The request for a file, and of whom it is made."""
    path = urllib.parse.quote(file["path"])
    if order["way"] == "peer":
        base, token = f"{order['peer']['url']}/{path}", order["peer"]["token"]
    else:
        base, token = f"{order['endpoint']}/{order['repo']}/resolve/{order['revision']}/{path}", order["token"]
    request = urllib.request.Request(base)  # noqa: S310 - http and https alone: the order says
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    return request, urllib.parse.urlsplit(base).netloc


def begins_at(answer: Any, size: int, there: int) -> int:
    """At which byte of the file the answer begins. Raises Trouble: it is of another file, or leaves some out."""
    if answer.status == 206:
        unit, _, rest = answer.headers.get("Content-Range", "").partition(" ")
        span, _, total = rest.partition("/")
        begins = span.partition("-")[0]
        if unit != "bytes" or not begins.isdigit() or int(begins) > there or total not in ("*", str(size)):
            raise Trouble(f"the answer's Content-Range is {answer.headers.get('Content-Range')!r}")
        return int(begins)
    length = answer.headers.get("Content-Length")
    if length is not None and int(length) != size:
        raise Trouble(f"the answer has {length} bytes, and the file has {size}")
    return 0


def refused(error: urllib.error.HTTPError, order: dict[str, Any], file: dict[str, Any], who: str, part: str) -> None:
    """What an error of the server's means. Raises Trouble or Fatal, or returns after having waited."""
    code = error.headers.get("X-Error-Code", "")
    if error.code == 416:
        os.unlink(part)  # it does not have so many bytes: the part is none of it
        raise Trouble(f"{who} has not so many bytes of {file['path']}")
    if error.code == 429 or (error.code == 503 and "Retry-After" in error.headers):
        seconds = retry_after(error.headers.get("Retry-After", ""))
        say(wait=seconds, by=who)
        time.sleep(seconds)
        return
    if order["way"] != "peer" and urllib.parse.urlsplit(error.url or "").netloc in ("", who):
        if code == "GatedRepo":
            raise Fatal(f"{order['repo']} is gated: accept its terms on the Hub with the account of the token")
        if error.code == 401 and code != "RepoNotFound":
            raise Fatal(f"the Hub does not take the token for {order['repo']}: {code or 'HTTP 401'}")
        if code == "RepoNotFound":
            raise Fatal(f"the Hub has no {order['repo']}, or does not show it to whom the token is of")
        if error.code == 404:
            raise Fatal(f"the Hub does not have {file['path']} of {order['repo']} at {order['revision']}: {code}")
    # What is only signed for a while (a CDN's 403) is asked for anew from the beginning.
    raise Trouble(f"{who}: {file['path']}: HTTP {error.code} {error.reason}")


def retry_after(text: str) -> float:
    """Seconds that a server asks us to wait."""
    try:
        return max(1.0, float(text))
    except ValueError:
        pass
    try:
        return max(1.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError):
        return 30.0


# --- through huggingface_hub ---


def hub_ways() -> list[str]:
    """The ways through huggingface_hub that this Python has."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return []
    return ["xet", "hub"] if importlib.util.find_spec("hf_xet") is not None else ["hub"]


_importing = threading.Lock()


def through_hub(order: dict[str, Any], file: dict[str, Any]) -> None:
    """Bring one file with huggingface_hub, with Xet or without."""
    into = os.path.join(order["aside"], "hub")
    with _importing:
        os.environ.update(
            HF_HOME=os.path.join(into, "home"),
            HF_HUB_DISABLE_XET="0" if order["way"] == "xet" else "1",
            HF_HUB_DISABLE_PROGRESS_BARS="1",
            HF_HUB_DISABLE_TELEMETRY="1",
            HF_HUB_DISABLE_UPDATE_CHECK="1",
            HF_HUB_OFFLINE="0",
            HF_ENDPOINT=order["endpoint"],
        )
        import huggingface_hub
        from huggingface_hub.utils import logging

        logging.set_verbosity_error()  # type: ignore[no-untyped-call, unused-ignore]
    try:
        path = huggingface_hub.hf_hub_download(
            order["repo"],
            file["path"],
            revision=order["revision"],
            token=order["token"] or False,
            local_dir=os.path.join(into, "files"),
        )
    except Exception as error:
        # Its exceptions are other ones in each major version; which way comes next is not decided by them.
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise Trouble(f"huggingface_hub: {file['path']}: {type(error).__name__}: {error}") from None
    say(fetched=file["path"], at=path)


if __name__ == "__main__":
    main()
