"""The Dishka providers of the platform: the database, and the dependencies of each service's handlers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable

from dishka import Provider, Scope, provide
from sqlalchemy.ext.asyncio import AsyncConnection

from integr8s_idem import EventPublisher
from providers.settings import PlatformSettings
from services.coordinator.admission import Admission
from services.database import Database
from services.k8s_worker.runner import Runner
from services.k8s_worker.runners import chosen_runner
from services.k8s_worker.worker import PodWorker
from services.result_processor.results import Results
from services.saga_orchestrator.saga import Sagas
from services.settings import PlatformSection


class DatabaseProvider(Provider):
    """The platform's section of the settings, and its `Database`, which is opened at first use."""

    scope = Scope.APP

    @provide
    def section(self, settings: PlatformSettings) -> PlatformSection:
        return settings.platform

    @provide
    async def database(self, settings: PlatformSection) -> AsyncIterable[Database]:
        database = Database(settings.database_url)
        try:
            await database.open()
            yield database
        finally:
            await database.close()


class TransactionProvider(Provider):
    """One transaction for each event, committed if the handler succeeds and rolled back otherwise."""

    scope = Scope.REQUEST

    @provide
    async def connection(self, database: Database) -> AsyncGenerator[AsyncConnection, BaseException | None]:
        async with database.transaction() as connection:
            error = yield connection
            if error is not None:
                await connection.rollback()


class CoordinatorProvider(Provider):
    """`Admission`, in the transaction of the event."""

    admission = provide(Admission, scope=Scope.REQUEST)


class ResultProcessorProvider(Provider):
    """`Results`, in the transaction of the event."""

    results = provide(Results, scope=Scope.REQUEST)


class SagaProvider(Provider):
    """`Sagas`, with their own short transactions: they commit before they publish."""

    scope = Scope.APP

    @provide
    def sagas(self, database: Database, settings: PlatformSection, publisher: EventPublisher) -> Sagas:
        return Sagas(database, settings, publisher)


class K8sWorkerProvider(Provider):
    """`PodWorker`, with its own short transactions: none is open while a script runs."""

    scope = Scope.APP

    @provide
    async def runner(self, settings: PlatformSection) -> AsyncIterable[Runner]:
        async with chosen_runner(settings) as runner:
            yield runner

    @provide
    def pods(
        self, database: Database, settings: PlatformSection, runner: Runner, publisher: EventPublisher
    ) -> PodWorker:
        return PodWorker(database, settings, runner, publisher)
