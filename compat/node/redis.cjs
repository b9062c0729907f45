// node-redis against a server: node redis.cjs PORT [PASSWORD]. Throws, and so exits with 1, at the first difference.
const assert = require("node:assert/strict");
const { createClient, RESP_TYPES } = require("redis");

async function main(port, password, RESP) {
  const options = { socket: { host: "127.0.0.1", port, reconnectStrategy: false }, password, name: "tester", RESP };
  const client = createClient(options);
  client.on("error", (error) => assert.fail(error));
  await client.connect();
  assert.equal(await client.ping(), "PONG");
  assert.equal(await client.echo("hello"), "hello");
  assert.equal(await client.clientGetName(), "tester");
  assert.equal((await client.clientInfo()).name, "tester");
  assert.match(await client.info("replication"), /role:master/);
  assert.equal((await client.configGet("maxclients")).maxclients, "10000");
  assert.equal(await client.dbSize(), 0);
  assert.equal((await client.commandCount()) > 40, true);
  assert.equal((await client.commandInfo(["ping"]))[0].name, "ping");

  assert.deepEqual(await client.multi().ping().echo("a").exec(), ["PONG", "a"]);
  const echoes = await Promise.all([...Array(1000).keys()].map((i) => client.echo(String(i))));
  assert.deepEqual(echoes.map(Number), [...Array(1000).keys()]);

  const rows = Buffer.from(new Float32Array(64 * 4096).map((_, i) => i).buffer);
  await client.sendCommand(["KV.PREFIX.DROP", "node"]);
  assert.equal(await client.sendCommand(["KV.PREFIX.REGISTER", "node", "64", "fp32"]), "OK");
  assert.equal(await client.sendCommand(["V.STOREBATCH", "node_pk", "0", "0", "4096", rows]), "OK");
  const binary = client.withTypeMapping({ [RESP_TYPES.BLOB_STRING]: Buffer });
  const fetched = await binary.sendCommand(["V.FETCH", "node_pk", "0", "RANGE", "0", "4096"]);
  assert.equal(Buffer.compare(fetched, rows), 0);
  const receipt = await client.sendCommand(["PION.STATS"]);
  assert.equal(RESP === 3 ? Object.keys(receipt).length : receipt.length, RESP === 3 ? 16 : 32);
  await assert.rejects(client.sendCommand(["NOSUCH", "a"]), /unknown command 'NOSUCH', with args beginning with: 'a'/);
  await client.close();
}

async function wrongPassword(port) {
  const client = createClient({ socket: { host: "127.0.0.1", port, reconnectStrategy: false }, password: "wrong" });
  client.on("error", () => {});
  await assert.rejects(client.connect(), /WRONGPASS/);
}

const [port, password] = process.argv.slice(2);
main(Number(port), password, 2)
  .then(() => main(Number(port), password, 3))
  .then(() => password && wrongPassword(Number(port)))
  .then(() => console.log("ok"));
