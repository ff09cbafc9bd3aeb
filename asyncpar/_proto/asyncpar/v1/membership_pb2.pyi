from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HostFrame(_message.Message):
    __slots__ = ("hello", "welcome", "content", "number", "received")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    hello: HostHello
    welcome: HostWelcome
    content: bytes
    number: int
    received: int
    def __init__(self, hello: _Optional[_Union[HostHello, _Mapping]] = ..., welcome: _Optional[_Union[HostWelcome, _Mapping]] = ..., content: _Optional[bytes] = ..., number: _Optional[int] = ..., received: _Optional[int] = ...) -> None: ...

class HostHello(_message.Message):
    __slots__ = ("job", "nnodes", "node_rank", "host", "version", "session", "port")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NNODES_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    job: str
    nnodes: int
    node_rank: int
    host: str
    version: str
    session: bytes
    port: int
    def __init__(self, job: _Optional[str] = ..., nnodes: _Optional[int] = ..., node_rank: _Optional[int] = ..., host: _Optional[str] = ..., version: _Optional[str] = ..., session: _Optional[bytes] = ..., port: _Optional[int] = ...) -> None: ...

class HostWelcome(_message.Message):
    __slots__ = ("resumed", "refusal", "exit_code")
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    resumed: bool
    refusal: str
    exit_code: int
    def __init__(self, resumed: _Optional[bool] = ..., refusal: _Optional[str] = ..., exit_code: _Optional[int] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("rank", "host", "host_id", "local_rank", "address")
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    host: str
    host_id: str
    local_rank: int
    address: str
    def __init__(self, rank: _Optional[int] = ..., host: _Optional[str] = ..., host_id: _Optional[str] = ..., local_rank: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("job", "generation", "world_size", "member", "settings", "timeout_seconds", "session")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    world_size: int
    member: Member
    settings: str
    timeout_seconds: float
    session: str
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., world_size: _Optional[int] = ..., member: _Optional[_Union[Member, _Mapping]] = ..., settings: _Optional[str] = ..., timeout_seconds: _Optional[float] = ..., session: _Optional[str] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("world", "refusal")
    WORLD_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    world: JoinedWorld
    refusal: JoinRefusal
    def __init__(self, world: _Optional[_Union[JoinedWorld, _Mapping]] = ..., refusal: _Optional[_Union[JoinRefusal, _Mapping]] = ...) -> None: ...

class JoinedWorld(_message.Message):
    __slots__ = ("job", "generation", "members")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class JoinRefusal(_message.Message):
    __slots__ = ("kind", "message", "ranks")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[JoinRefusal.Kind]
        KIND_USAGE: _ClassVar[JoinRefusal.Kind]
        KIND_STALE: _ClassVar[JoinRefusal.Kind]
        KIND_TIMEOUT: _ClassVar[JoinRefusal.Kind]
        KIND_LOST: _ClassVar[JoinRefusal.Kind]
        KIND_CLOSED: _ClassVar[JoinRefusal.Kind]
    KIND_UNSPECIFIED: JoinRefusal.Kind
    KIND_USAGE: JoinRefusal.Kind
    KIND_STALE: JoinRefusal.Kind
    KIND_TIMEOUT: JoinRefusal.Kind
    KIND_LOST: JoinRefusal.Kind
    KIND_CLOSED: JoinRefusal.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    kind: JoinRefusal.Kind
    message: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, kind: _Optional[_Union[JoinRefusal.Kind, str]] = ..., message: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...
