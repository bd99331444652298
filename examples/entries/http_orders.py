"""An HTTP API whose clients may retry: FastAPI, Dishka, and the guard for the `Idempotency-Key` header.

`python -m examples.entries.http_orders` calls it in process: an order, its retry, the same key for another order, and a
retry that arrives too early.  `uvicorn --factory examples.entries.http_orders:application` serves it, with its API
documentation under `/docs`.  Needs fastapi and the extra `httpx`.
"""

# Without `from __future__ import annotations`: FastAPI reads them from functions that Dishka has wrapped.
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from dishka import AsyncContainer, FromDishka, Provider, Scope, make_async_container, provide

try:
    import httpx
    from dishka.integrations.fastapi import DishkaRoute, setup_dishka
    from fastapi import APIRouter, FastAPI, HTTPException
except ModuleNotFoundError as error:
    if __name__ == "__main__":
        raise SystemExit(f"this needs {error.name}: pip install fastapi '.[httpx]' in the checkout") from None
    raise

from pydantic import BaseModel, Field

from integr8s_idem import Settings
from integr8s_idem.config import MemoryStoreSettings
from integr8s_idem.integrations.asgi import IdempotencyKeyMiddleware, by_authorization
from integr8s_idem.integrations.dishka import IdempotencyProvider, ServiceName, TelemetryProvider
from integr8s_idem.integrations.openapi import with_idempotency_keys


class NewOrder(BaseModel):
    item: Annotated[str, Field(min_length=1, max_length=100)]
    amount: Annotated[int, Field(ge=1, le=1_000_000)]


class Order(NewOrder):
    number: int


class Refusal(BaseModel):
    """An error response in FastAPI's format."""

    detail: str


class Orders:
    """Side effects that must not happen twice."""

    def __init__(self) -> None:
        self.placed: list[Order] = []

    async def place(self, new: NewOrder) -> Order:
        await asyncio.sleep(0.01)  # a payment
        order = Order(number=len(self.placed) + 1, item=new.item, amount=new.amount)
        self.placed.append(order)
        return order


router = APIRouter(route_class=DishkaRoute)


@router.post("/orders", status_code=201)
async def place(new: NewOrder, orders: FromDishka[Orders]) -> Order:
    return await orders.place(new)


@router.post("/orders/{number}/again", status_code=201, responses={404: {"model": Refusal}})
async def place_again(number: int, orders: FromDishka[Orders]) -> Order:
    if not 0 < number <= len(orders.placed):
        raise HTTPException(404, "order not found")
    return await orders.place(orders.placed[number - 1])


@router.get("/orders")
async def placed(orders: FromDishka[Orders]) -> list[Order]:
    return orders.placed


class ShopProvider(Provider):
    @provide(scope=Scope.APP)
    def orders(self) -> Orders:
        return Orders()


class Shop(FastAPI):
    def openapi(self) -> dict[str, Any]:
        return with_idempotency_keys(super().openapi(), required=True)


def application(settings: Settings | None = None) -> Shop:
    """Create the API.  Several processes must share a store."""
    container = make_async_container(
        TelemetryProvider(),
        IdempotencyProvider(),
        ShopProvider(),
        context={
            Settings: settings or Settings(store=MemoryStoreSettings(kind="memory")),
            ServiceName: ServiceName("shop"),
        },
    )
    app = Shop(title="Shop", lifespan=_closing(container), responses={400: {"model": Refusal}})
    app.include_router(router)
    setup_dishka(container, app)
    # Outermost: the guard encloses Dishka's scope, so that responses are sent after its commit.
    app.add_middleware(
        IdempotencyKeyMiddleware,
        container=container,
        identity=by_authorization,
        required=True,
        documentation="/docs",
    )
    return app


def _closing(container: AsyncContainer) -> Any:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await container.close()

    return lifespan


async def main() -> None:
    app = application()
    ann = {"Authorization": "Bearer ann"}
    shop = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop", headers=ann)

    async def order(key: str, amount: int) -> None:
        new = {"item": "book", "amount": amount}
        response = await shop.post("/orders", json=new, headers={"Idempotency-Key": f'"{key}"'})
        body = response.json()
        replayed = " (replayed)" if "idempotency-replayed" in response.headers else ""
        print(f"{key}: {response.status_code} {body.get('title') or 'order ' + str(body['number'])}{replayed}")

    async with app.router.lifespan_context(app), shop:
        await order("a", 1)
        await order("a", 1)
        await order("a", 2)
        await asyncio.gather(order("b", 1), order("b", 1))
        print(f"placed: {len((await shop.get('/orders')).json())}")


if __name__ == "__main__":
    asyncio.run(main())
