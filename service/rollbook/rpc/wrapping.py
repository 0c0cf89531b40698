"""An interceptor's way around the methods of the ledger service: each is wrapped once, when it is first called.

Owns that cache and how a wrapped method is put together again. Never knows what stands around a call, nor a verb.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import grpc

SERVICE = "rollbook.v1.LedgerService"
Unary = Callable[[Any, grpc.ServicerContext], Any]
Stream = Callable[[Any, grpc.ServicerContext], Iterator[Any]]


class Wrapping(grpc.ServerInterceptor):
    """Wraps what ``method_of`` names; everything else passes untouched."""

    def __init__(self) -> None:
        self._wrapped: dict[str, grpc.RpcMethodHandler] = {}

    @abstractmethod
    def around(self, method: str, handler: grpc.RpcMethodHandler) -> tuple[Unary, Stream]:
        """The method with what stands around it, as one answer and as a stream of them; only its own kind is called."""

    def method_of(self, path: str) -> str:
        """The method to wrap; empty for none. Every method of the ledger service unless overridden."""
        service, _, method = path.lstrip("/").partition("/")
        return method if service == SERVICE else ""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        path = handler_call_details.method
        method = self.method_of(path)
        if not method:
            return continuation(handler_call_details)
        if path not in self._wrapped:
            handler = continuation(handler_call_details)
            if handler is None:
                return None  # not remembered, since anybody can ask for methods that do not exist
            unary, stream = self.around(method, handler)
            make, behaviour = grpc.unary_unary_rpc_method_handler, unary
            if handler.response_streaming:
                make, behaviour = grpc.unary_stream_rpc_method_handler, stream
            self._wrapped[path] = make(behaviour, handler.request_deserializer, handler.response_serializer)
        return self._wrapped[path]
