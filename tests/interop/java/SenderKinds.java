import java.util.Arrays;
import java.util.List;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * The ways to send: sync, avoiding (sync, and not to where a send failed before: sendLatencyFaultEnable), async (at most 8 on their way), batch (of 5), transaction (each fifth rolled back, and never
 * consumed), ordered (the queue by a key, one of 4 for each thread; the next message only after the outcome of the one before).
 * Keys: KIND-NUMBER; batch-NUMBER-INDEX; transaction-NUMBER, or rolledback-NUMBER; ordered-NUMBER-KEY.
 */
final class SenderKinds {
    private static final int ON_THEIR_WAY = 8;
    private static final int IN_A_BATCH = 5;
    private static final int KEYS = 4;
    private static final Semaphore FREE = new Semaphore(ON_THEIR_WAY);

    private SenderKinds() {
    }

    static DefaultMQProducer producer(String kind) {
        if (!kind.equals("transaction")) {
            DefaultMQProducer producer = new DefaultMQProducer("stock-" + kind);
            producer.setSendLatencyFaultEnable(kind.equals("avoiding"));
            return producer;
        }
        TransactionMQProducer producer = new TransactionMQProducer("stock-" + kind);
        producer.setTransactionListener(new Outcomes());
        return producer;
    }

    static SendLoop.Way way(String kind, DefaultMQProducer producer, SendLoop loop) {
        switch (kind) {
            case "sync":
            case "avoiding":
                return loop.sync(producer, kind);
            case "async":
                return async(producer, loop);
            case "batch":
                return batch(producer, loop);
            case "transaction":
                return transaction((TransactionMQProducer) producer, loop);
            case "ordered":
                return ordered(producer, loop);
            default:
                throw new IllegalArgumentException(kind + ": allowed are sync, avoiding, async, batch, transaction, ordered");
        }
    }

    /** Waits for what is still on its way. */
    static void awaitAsync() throws InterruptedException {
        FREE.tryAcquire(ON_THEIR_WAY, 20, TimeUnit.SECONDS);
    }

    private static SendLoop.Way async(DefaultMQProducer producer, SendLoop loop) {
        return (thread, number) -> {
            String key = "async-" + number;
            FREE.acquire();
            try {
                producer.send(loop.message(key), new SendCallback() {
                    @Override
                    public void onSuccess(SendResult sent) {
                        FREE.release();
                        SendLoop.outcome(sent, key);
                    }

                    @Override
                    public void onException(Throwable error) {
                        FREE.release();
                        SendLoop.failed(error, key);
                    }
                });
            } catch (Exception error) {
                FREE.release();
                SendLoop.failed(error, key);
            }
        };
    }

    private static SendLoop.Way batch(DefaultMQProducer producer, SendLoop loop) {
        return (thread, number) -> {
            String[] keys = new String[IN_A_BATCH];
            for (int i = 0; i < IN_A_BATCH; i++) {
                keys[i] = "batch-" + number + "-" + i;
            }
            List<Message> messages = Arrays.stream(keys).map(loop::message).collect(Collectors.toList());
            try {
                SendLoop.outcome(producer.send(messages), keys);
            } catch (Exception error) {
                SendLoop.failed(error, keys);
            }
        };
    }

    private static SendLoop.Way transaction(TransactionMQProducer producer, SendLoop loop) {
        return (thread, number) -> {
            boolean isRolledBack = number % 5 == 4;
            String key = (isRolledBack ? "rolledback-" : "transaction-") + number;
            try {
                SendResult sent = producer.sendMessageInTransaction(loop.message(key), null);
                if (!isRolledBack) {
                    SendLoop.outcome(sent, key);
                }
            } catch (Exception error) {
                SendLoop.failed(error, key);
            }
        };
    }

    private static SendLoop.Way ordered(DefaultMQProducer producer, SendLoop loop) {
        return (thread, number) -> {
            int by = thread * KEYS + number % KEYS;
            String key = "ordered-" + number + "-" + by;
            try {
                SendResult sent = producer.send(loop.message(key),
                    (queues, message, chosen) -> queues.get((Integer) chosen % queues.size()), by);
                SendLoop.outcome(sent, key);
            } catch (Exception error) {
                SendLoop.failed(error, key);
            }
        };
    }

    private static final class Outcomes implements TransactionListener {
        @Override
        public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
            return of(message);
        }

        @Override
        public LocalTransactionState checkLocalTransaction(MessageExt message) {
            return of(message);
        }

        private static LocalTransactionState of(Message message) {
            boolean isRolledBack = message.getKeys().startsWith("rolledback");
            return isRolledBack ? LocalTransactionState.ROLLBACK_MESSAGE : LocalTransactionState.COMMIT_MESSAGE;
        }
    }
}
