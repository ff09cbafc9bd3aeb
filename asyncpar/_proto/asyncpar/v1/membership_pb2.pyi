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
    __slots__ = ("job", "nnodes", "node_rank", "host", "version", "session")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NNODES_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    job: str
    nnodes: int
    node_rank: int
    host: str
    version: str
    session: bytes
    def __init__(self, job: _Optional[str] = ..., nnodes: _Optional[int] = ..., node_rank: _Optional[int] = ..., host: _Optional[str] = ..., version: _Optional[str] = ..., session: _Optional[bytes] = ...) -> None: ...

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

class AgentEvent(_message.Message):
    __slots__ = ("hello", "rank_ended", "stopped", "interrupted", "state", "told", "observed", "collected", "number", "received", "clock")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RANK_ENDED_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    INTERRUPTED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TOLD_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    COLLECTED_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    rank_ended: RankEnded
    stopped: AgentStopped
    interrupted: AgentInterrupted
    state: RankState
    told: RankTold
    observed: HostObserved
    collected: HostCollected
    number: int
    received: int
    clock: float
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., rank_ended: _Optional[_Union[RankEnded, _Mapping]] = ..., stopped: _Optional[_Union[AgentStopped, _Mapping]] = ..., interrupted: _Optional[_Union[AgentInterrupted, _Mapping]] = ..., state: _Optional[_Union[RankState, _Mapping]] = ..., told: _Optional[_Union[RankTold, _Mapping]] = ..., observed: _Optional[_Union[HostObserved, _Mapping]] = ..., collected: _Optional[_Union[HostCollected, _Mapping]] = ..., number: _Optional[int] = ..., received: _Optional[int] = ..., clock: _Optional[float] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("job", "nnodes", "nproc", "node_rank", "host", "session", "version")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NNODES_FIELD_NUMBER: _ClassVar[int]
    NPROC_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    job: str
    nnodes: int
    nproc: int
    node_rank: int
    host: str
    session: bytes
    version: str
    def __init__(self, job: _Optional[str] = ..., nnodes: _Optional[int] = ..., nproc: _Optional[int] = ..., node_rank: _Optional[int] = ..., host: _Optional[str] = ..., session: _Optional[bytes] = ..., version: _Optional[str] = ...) -> None: ...

class RankEnded(_message.Message):
    __slots__ = ("generation", "rank", "local_rank", "pid", "returncode", "at", "report", "stderr_tail", "stderr_file", "lost")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RETURNCODE_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    STDERR_TAIL_FIELD_NUMBER: _ClassVar[int]
    STDERR_FILE_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    generation: int
    rank: int
    local_rank: int
    pid: int
    returncode: int
    at: float
    report: FailureReport
    stderr_tail: str
    stderr_file: str
    lost: str
    def __init__(self, generation: _Optional[int] = ..., rank: _Optional[int] = ..., local_rank: _Optional[int] = ..., pid: _Optional[int] = ..., returncode: _Optional[int] = ..., at: _Optional[float] = ..., report: _Optional[_Union[FailureReport, _Mapping]] = ..., stderr_tail: _Optional[str] = ..., stderr_file: _Optional[str] = ..., lost: _Optional[str] = ...) -> None: ...

class FailureReport(_message.Message):
    __slots__ = ("type_name", "message", "traceback", "is_peer_error", "blames", "call")
    TYPE_NAME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    IS_PEER_ERROR_FIELD_NUMBER: _ClassVar[int]
    BLAMES_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    type_name: str
    message: str
    traceback: str
    is_peer_error: bool
    blames: int
    call: str
    def __init__(self, type_name: _Optional[str] = ..., message: _Optional[str] = ..., traceback: _Optional[str] = ..., is_peer_error: _Optional[bool] = ..., blames: _Optional[int] = ..., call: _Optional[str] = ...) -> None: ...

class AgentStopped(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class AgentInterrupted(_message.Message):
    __slots__ = ("signal_number",)
    SIGNAL_NUMBER_FIELD_NUMBER: _ClassVar[int]
    signal_number: int
    def __init__(self, signal_number: _Optional[int] = ...) -> None: ...

class RankState(_message.Message):
    __slots__ = ("generation", "rank", "phase", "condition", "seconds", "place")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PHASE_UNSPECIFIED: _ClassVar[RankState.Phase]
        FORMING: _ClassVar[RankState.Phase]
        MEMBER: _ClassVar[RankState.Phase]
        LEFT: _ClassVar[RankState.Phase]
    PHASE_UNSPECIFIED: RankState.Phase
    FORMING: RankState.Phase
    MEMBER: RankState.Phase
    LEFT: RankState.Phase
    class Condition(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CONDITION_UNSPECIFIED: _ClassVar[RankState.Condition]
        STOPPED: _ClassVar[RankState.Condition]
        HUNG: _ClassVar[RankState.Condition]
        BUSY: _ClassVar[RankState.Condition]
        UNINTERRUPTIBLE: _ClassVar[RankState.Condition]
    CONDITION_UNSPECIFIED: RankState.Condition
    STOPPED: RankState.Condition
    HUNG: RankState.Condition
    BUSY: RankState.Condition
    UNINTERRUPTIBLE: RankState.Condition
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    rank: int
    phase: RankState.Phase
    condition: RankState.Condition
    seconds: float
    place: str
    def __init__(self, generation: _Optional[int] = ..., rank: _Optional[int] = ..., phase: _Optional[_Union[RankState.Phase, str]] = ..., condition: _Optional[_Union[RankState.Condition, str]] = ..., seconds: _Optional[float] = ..., place: _Optional[str] = ...) -> None: ...

class HostObserved(_message.Message):
    __slots__ = ("summary",)
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    summary: bytes
    def __init__(self, summary: _Optional[bytes] = ...) -> None: ...

class HostCollected(_message.Message):
    __slots__ = ("request", "answer", "is_last")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    request: int
    answer: bytes
    is_last: bool
    def __init__(self, request: _Optional[int] = ..., answer: _Optional[bytes] = ..., is_last: _Optional[bool] = ...) -> None: ...

class RankTold(_message.Message):
    __slots__ = ("generation", "rank", "notice", "blocked", "has_failed")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_FIELD_NUMBER: _ClassVar[int]
    HAS_FAILED_FIELD_NUMBER: _ClassVar[int]
    generation: int
    rank: int
    notice: bytes
    blocked: str
    has_failed: bool
    def __init__(self, generation: _Optional[int] = ..., rank: _Optional[int] = ..., notice: _Optional[bytes] = ..., blocked: _Optional[str] = ..., has_failed: _Optional[bool] = ...) -> None: ...

class AgentCommand(_message.Message):
    __slots__ = ("welcome", "assign", "stop", "finish", "condemn", "announce", "condition", "collect", "number", "received")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ASSIGN_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    CONDEMN_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    COLLECT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    assign: Assign
    stop: Stop
    finish: Finish
    condemn: Condemn
    announce: Announce
    condition: Condition
    collect: Collect
    number: int
    received: int
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., assign: _Optional[_Union[Assign, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., condemn: _Optional[_Union[Condemn, _Mapping]] = ..., announce: _Optional[_Union[Announce, _Mapping]] = ..., condition: _Optional[_Union[Condition, _Mapping]] = ..., collect: _Optional[_Union[Collect, _Mapping]] = ..., number: _Optional[int] = ..., received: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("resumed",)
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    resumed: bool
    def __init__(self, resumed: _Optional[bool] = ...) -> None: ...

class Assign(_message.Message):
    __slots__ = ("generation", "restart_count", "group_rank", "group_world_size", "rank_offset", "world_size", "master_addr", "master_port")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RESTART_COUNT_FIELD_NUMBER: _ClassVar[int]
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    GROUP_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RANK_OFFSET_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    MASTER_ADDR_FIELD_NUMBER: _ClassVar[int]
    MASTER_PORT_FIELD_NUMBER: _ClassVar[int]
    generation: int
    restart_count: int
    group_rank: int
    group_world_size: int
    rank_offset: int
    world_size: int
    master_addr: str
    master_port: int
    def __init__(self, generation: _Optional[int] = ..., restart_count: _Optional[int] = ..., group_rank: _Optional[int] = ..., group_world_size: _Optional[int] = ..., rank_offset: _Optional[int] = ..., world_size: _Optional[int] = ..., master_addr: _Optional[str] = ..., master_port: _Optional[int] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("generation", "signal_number", "reason", "rank", "host", "how")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_NUMBER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    HOW_FIELD_NUMBER: _ClassVar[int]
    generation: int
    signal_number: int
    reason: str
    rank: int
    host: str
    how: str
    def __init__(self, generation: _Optional[int] = ..., signal_number: _Optional[int] = ..., reason: _Optional[str] = ..., rank: _Optional[int] = ..., host: _Optional[str] = ..., how: _Optional[str] = ...) -> None: ...

class Condemn(_message.Message):
    __slots__ = ("generation", "rank", "host", "how")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    HOW_FIELD_NUMBER: _ClassVar[int]
    generation: int
    rank: int
    host: str
    how: str
    def __init__(self, generation: _Optional[int] = ..., rank: _Optional[int] = ..., host: _Optional[str] = ..., how: _Optional[str] = ...) -> None: ...

class Condition(_message.Message):
    __slots__ = ("generation", "rank", "how")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOW_FIELD_NUMBER: _ClassVar[int]
    generation: int
    rank: int
    how: str
    def __init__(self, generation: _Optional[int] = ..., rank: _Optional[int] = ..., how: _Optional[str] = ...) -> None: ...

class Announce(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class Collect(_message.Message):
    __slots__ = ("request", "kind", "ranks")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    request: int
    kind: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request: _Optional[int] = ..., kind: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("exit_code", "message")
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    exit_code: int
    message: str
    def __init__(self, exit_code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...
