"""Images of messages: in data URLs, and at web addresses of hosts that the server was allowed to ask."""

from __future__ import annotations

import base64
import binascii
import io
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit

from .api_errors import ApiError
from .limits import Limits

FETCH_SECONDS = 10.0
ANY_HOST = "*"


def read_images(urls: Sequence[str], limits: Limits) -> list[Any]:
    """Return the image of each URL as an RGB image of Pillow.

    Raises ApiError (400) for more images, or larger ones, than the limits say, for an address that the server may not
    ask, and for what is no image.
    """
    if len(urls) > limits.max_images:
        raise _refused(f"the messages have {len(urls)} images; this server takes {limits.max_images} a request")
    return [_decoded(_content(url, limits), limits) for url in urls]


def _content(url: str, limits: Limits) -> bytes:
    scheme = url.partition(":")[0].lower()
    if scheme == "data":
        return _of_data_url(url)
    if scheme in ("http", "https"):
        return _fetched(url, limits)
    raise _refused("an image_url is no data URL (data:image/png;base64,...)")


def _of_data_url(url: str) -> bytes:
    head, comma, data = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise _refused("the data URL of an image is not in base64 (data:image/png;base64,...)")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise _refused("the data URL of an image holds what is no base64") from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it may lead to a host that was not allowed."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _fetched(url: str, limits: Limits) -> bytes:
    host = (urlsplit(url).hostname or "").lower()
    if not {host, ANY_HOST} & {name.lower() for name in limits.image_hosts}:
        raise _refused(
            f"this server does not fetch images from {host[:200]!r}; send a data URL, or start it with "
            f"--allow-image-host {host[:200]}"
        )
    most = limits.max_body_bytes
    # No proxy of the environment is asked, which may reach more than the server should.
    opener = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=FETCH_SECONDS) as answer:
            content: bytes = answer.read(most + 1)
    except (URLError, OSError, HTTPException, ValueError) as error:
        raise _refused(f"an image could not be fetched from {host[:200]!r}: {error}") from error
    if len(content) > most:
        raise _refused(f"an image has more than {most} bytes, which is as much as this server takes")
    return content


def _decoded(content: bytes, limits: Limits) -> Any:
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(content)) as image:
            width, height = image.size
            if width * height > limits.max_image_pixels:  # before any of them is decoded
                most = limits.max_image_pixels
                raise _refused(f"an image has {width} x {height} pixels; this server takes {most} at most")
            return ImageOps.exif_transpose(image).convert("RGB")
    except ApiError:
        raise
    except Exception as error:  # Pillow's readers raise of many kinds for a broken file
        raise _refused("an image_url holds no image that can be read") from error


def _refused(message: str) -> ApiError:
    return ApiError(400, message, field="messages")
