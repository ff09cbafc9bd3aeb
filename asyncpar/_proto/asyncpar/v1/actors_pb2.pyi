from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ActorPart(_message.Message):
    __slots__ = ("call", "item", "end")
    CALL_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    call: ActorCall
    item: ActorItem
    end: int
    def __init__(self, call: _Optional[_Union[ActorCall, _Mapping]] = ..., item: _Optional[_Union[ActorItem, _Mapping]] = ..., end: _Optional[int] = ...) -> None: ...

class ActorItem(_message.Message):
    __slots__ = ("stream", "value")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    stream: int
    value: Value
    def __init__(self, stream: _Optional[int] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...

class ActorCall(_message.Message):
    __slots__ = ("actor", "endpoint", "rank", "arguments", "keywords", "format")
    class Format(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MSGPACK: _ClassVar[ActorCall.Format]
        JSON: _ClassVar[ActorCall.Format]
    MSGPACK: ActorCall.Format
    JSON: ActorCall.Format
    class KeywordsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    KEYWORDS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    actor: str
    endpoint: str
    rank: int
    arguments: _containers.RepeatedCompositeFieldContainer[Value]
    keywords: _containers.MessageMap[str, Value]
    format: ActorCall.Format
    def __init__(self, actor: _Optional[str] = ..., endpoint: _Optional[str] = ..., rank: _Optional[int] = ..., arguments: _Optional[_Iterable[_Union[Value, _Mapping]]] = ..., keywords: _Optional[_Mapping[str, Value]] = ..., format: _Optional[_Union[ActorCall.Format, str]] = ...) -> None: ...

class ActorResult(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: Value
    def __init__(self, value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...

class ActorTold(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Value(_message.Message):
    __slots__ = ("msgpack", "json", "array", "stream", "arrays")
    MSGPACK_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    msgpack: bytes
    json: str
    array: Array
    stream: int
    arrays: _containers.RepeatedCompositeFieldContainer[Array]
    def __init__(self, msgpack: _Optional[bytes] = ..., json: _Optional[str] = ..., array: _Optional[_Union[Array, _Mapping]] = ..., stream: _Optional[int] = ..., arrays: _Optional[_Iterable[_Union[Array, _Mapping]]] = ...) -> None: ...

class Array(_message.Message):
    __slots__ = ("dtype", "shape", "content")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    content: bytes
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., content: _Optional[bytes] = ...) -> None: ...

class ActorError(_message.Message):
    __slots__ = ("type", "message", "traceback", "rank")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    type: str
    message: str
    traceback: str
    rank: int
    def __init__(self, type: _Optional[str] = ..., message: _Optional[str] = ..., traceback: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...
