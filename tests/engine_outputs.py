"""What an engine, or several, answer to one request."""

from __future__ import annotations


async def outputs_of(engines, request):
    """Its outputs; leaving the loop early aborts it."""
    subscription = engines.open([request])
    try:
        while True:
            for output in await subscription.get():
                yield output
                if output.finish_reason is not None:
                    return
    finally:
        engines.release(subscription, [request.request_id])
