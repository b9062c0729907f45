// ioredis against a server: node ioredis.cjs PORT [PASSWORD]. Throws, and so exits with 1, at the first difference.
const assert = require("node:assert/strict");
const Redis = require("ioredis");

async function main(port, password) {
  const client = new Redis({ host: "127.0.0.1", port, password, connectionName: "tester", maxRetriesPerRequest: 1 });
  client.on("error", (error) => assert.fail(error));
  assert.equal(await client.ping(), "PONG");
  assert.equal(client.status, "ready");
  assert.equal(await client.echo("hello"), "hello");
  assert.equal(await client.client("GETNAME"), "tester");
  assert.match(await client.client("INFO"), /lib-name=ioredis/);
  assert.match(await client.info("replication"), /role:master/);
  assert.deepEqual([...Object.values(await client.config("GET", "maxclients"))].flat().includes("10000"), true);

  const replies = await client.multi().ping().echo("a").call("SELECT", "42").exec();
  assert.deepEqual(replies.slice(0, 2), [[null, "PONG"], [null, "a"]]);
  assert.match(replies[2][0].message, /DB index is out of range/);

  const pipeline = client.pipeline();
  for (let i = 0; i < 1000; i++) pipeline.echo(String(i));
  assert.deepEqual((await pipeline.exec()).map(([, value]) => Number(value)), [...Array(1000).keys()]);

  const rows = Buffer.from(new Float32Array(64 * 4096).map((_, i) => i).buffer);
  await client.call("KV.PREFIX.DROP", "ioredis");
  assert.equal(await client.call("KV.PREFIX.REGISTER", "ioredis", "64", "fp32"), "OK");
  assert.equal(await client.call("V.STOREBATCH", "ioredis_pk", "0", "0", "4096", rows), "OK");
  const fetched = await client.callBuffer("V.FETCH", "ioredis_pk", "0", "RANGE", "0", "4096");
  assert.equal(Buffer.compare(fetched, rows), 0);
  assert.equal(await client.call("KV.PREFIX.LOOKUP", "ioredis"), "HIT");
  assert.equal(Object.keys(await client.call("PION.STATS")).length >= 16, true);
  await assert.rejects(client.call("NOSUCH", "a"), /unknown command 'NOSUCH', with args beginning with: 'a'/);
  assert.equal(await client.quit(), "OK");
}

async function wrongPassword(port) {
  const client = new Redis({ host: "127.0.0.1", port, password: "wrong", retryStrategy: null, lazyConnect: true });
  client.on("error", () => {});
  await assert.rejects(client.connect().then(() => client.ping()), /WRONGPASS|NOAUTH|Connection is closed/);
  client.disconnect();
}

const [port, password] = process.argv.slice(2);
main(Number(port), password)
  .then(() => password && wrongPassword(Number(port)))
  .then(() => console.log("ok"));
