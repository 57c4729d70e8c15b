// Runs pg-boss for the benchmark. Each line of stdin is a request, each line of stdout the answer to
// one, in any order: [id, "insert", jobs], [id, "fetch", count] and [id, "complete", ids].
import { createInterface } from 'node:readline'
import { PgBoss } from 'pg-boss'

const QUEUE = 'bench'

const boss = new PgBoss({ connectionString: process.env.DATABASE_URL })
boss.on('error', fail)
await boss.start()
await boss.createQueue(QUEUE)
answer([0, null])

const verbs = {
  insert: async (jobs) => void (await boss.insert(QUEUE, jobs)),
  fetch: (batchSize) => boss.fetch(QUEUE, { batchSize }),
  complete: async (ids) => void (await boss.complete(QUEUE, ids)),
}

const requests = createInterface({ input: process.stdin, crlfDelay: Infinity })
requests.on('line', (line) => {
  const [id, verb, argument] = JSON.parse(line)
  verbs[verb](argument).then((result) => answer([id, result ?? null]), fail)
})
// The adapter has ended, however it did.
requests.on('close', () => process.exit(0))

function answer(value) {
  process.stdout.write(JSON.stringify(value) + '\n')
}

// A request without an answer would be waited for in vain, so nothing is done after an error.
function fail(error) {
  console.error(error)
  process.exit(1)
}
