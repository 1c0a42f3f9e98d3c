import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * What a broker does beyond storing: retries, dead letters, delays, timers, recalls, transactions.
 *
 * Features NAMESERVERS produce GROUP: each line `MODE VALUE TOPIC COUNT` of stdin sends in a thread of its own,
 * COUNT messages, or until a line `stop` where COUNT is 0. Modes: fails (consumers fail it VALUE times), level, sec, ms,
 * at (ms from now), recall (due after VALUE ms, taken back at once), and transaction (VALUE is commit, rollback,
 * later-commit or later-rollback; a later one is decided by the check). Lines: {"acked": key, "mode", "value", "topic",
 * "sent": ms before the send, "at": ms}, {"recalled": key}, {"checked": key, "at"}, {"failed": key, "why", "at"},
 * {"produced": line}, {"stopped": true}.
 *
 * Features NAMESERVERS consume GROUP NAME MAX_RECONSUME TOPIC...: a push consumer, and one of the group's dead letters.
 * Lines: {"key", "topic", "times": reconsumeTimes, "fails": whether it is given back, "at"}, {"dead": key, "times"}.
 */
public final class Features {
    private static final AtomicInteger NUMBERS = new AtomicInteger();
    private static volatile boolean stopped;

    public static void main(String[] args) throws Exception {
        // Read when the client's classes load: dead letters have no topic, and so no owner, before the first of them.
        System.setProperty("rocketmq.client.rebalance.waitInterval", "1000");
        if (args[1].equals("consume")) {
            consume(args);
        } else {
            produce(args[0], args[2]);
        }
    }

    private static void produce(String servers, String group) throws Exception {
        TransactionMQProducer producer = new TransactionMQProducer(group);
        producer.setNamesrvAddr(servers);
        producer.setPollNameServerInterval(1000);
        producer.setRetryTimesWhenSendFailed(5);
        producer.setTransactionListener(new Outcomes());
        producer.start();
        List<Thread> threads = new ArrayList<>();
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = commands.readLine(); line != null; line = commands.readLine()) {
            if (line.equals("stop")) {
                stopped = true;
                join(threads);
                stopped = false;
                Lines.print("stopped", true);
                continue;
            }
            String command = line;
            Thread thread = new Thread(() -> sendAll(producer, command), command);
            thread.start();
            threads.add(thread);
        }
        stopped = true;
        join(threads);
        producer.shutdown();
        Lines.print("done", true);
        System.exit(0);
    }

    private static void join(List<Thread> threads) throws InterruptedException {
        for (Thread thread : threads) {
            thread.join();
        }
        threads.clear();
    }

    private static void sendAll(TransactionMQProducer producer, String command) {
        String[] words = command.split(" ");
        int count = Integer.parseInt(words[3]);
        for (int i = 0; count == 0 ? !stopped : i < count; i++) {
            String key = words[0] + "-" + words[1] + "-" + NUMBERS.getAndIncrement();
            try {
                send(producer, key, words[0], words[1], words[2]);
                if (count == 0) {
                    Thread.sleep(20);
                }
            } catch (InterruptedException error) {
                return;
            } catch (Exception error) {
                Lines.print("failed", key, "why", error, "at", System.currentTimeMillis());
            }
        }
        Lines.print("produced", command);
    }

    private static void send(TransactionMQProducer producer, String key, String mode, String value, String topic)
        throws Exception {
        Message message = new Message(topic, "", key, ("body of " + key).getBytes(StandardCharsets.UTF_8));
        long sentAt = System.currentTimeMillis();
        SendResult sent;
        if (mode.equals("transaction")) {
            message.putUserProperty("outcome", value);
            sent = producer.sendMessageInTransaction(message, null);
        } else {
            wish(message, mode, Integer.parseInt(value), sentAt);
            sent = producer.send(message);
        }
        if (sent.getSendStatus() != SendStatus.SEND_OK) {
            Lines.print("failed", key, "why", sent.getSendStatus(), "at", System.currentTimeMillis());
            return;
        }
        Lines.print("acked", key, "mode", mode, "value", value, "topic", topic, "sent", sentAt, "at", System.currentTimeMillis());
        if (mode.equals("recall")) {
            producer.recallMessage(topic, sent.getRecallHandle());
            Lines.print("recalled", key);
        }
    }

    private static void wish(Message message, String mode, int value, long sentAt) {
        switch (mode) {
            case "fails":
                message.putUserProperty("fails", String.valueOf(value));
                break;
            case "level":
                message.setDelayTimeLevel(value);
                break;
            case "sec":
                message.setDelayTimeSec(value);
                break;
            case "ms":
            case "recall":
                message.setDelayTimeMs(value);
                break;
            case "at":
                message.setDeliverTimeMs(sentAt + value);
                break;
            default:
                throw new IllegalArgumentException(mode);
        }
    }

    private static final class Outcomes implements TransactionListener {
        @Override
        public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
            String outcome = message.getUserProperty("outcome");
            return outcome.startsWith("later-") ? LocalTransactionState.UNKNOW : state(outcome);
        }

        @Override
        public LocalTransactionState checkLocalTransaction(MessageExt message) {
            Lines.print("checked", message.getKeys(), "at", System.currentTimeMillis());
            return state(message.getUserProperty("outcome"));
        }

        private static LocalTransactionState state(String outcome) {
            return outcome.endsWith("commit")
                ? LocalTransactionState.COMMIT_MESSAGE : LocalTransactionState.ROLLBACK_MESSAGE;
        }
    }

    private static void consume(String[] args) throws Exception {
        DefaultMQPushConsumer consumer = consumer(args[0], args[2], args[3]);
        consumer.setMaxReconsumeTimes(Integer.parseInt(args[4]));
        for (int i = 5; i < args.length; i++) {
            consumer.subscribe(args[i], "*");
        }
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            MessageExt message = messages.get(0);
            String fails = message.getUserProperty("fails");
            boolean isFailed = fails != null && message.getReconsumeTimes() < Integer.parseInt(fails);
            Lines.print("key", message.getKeys(), "topic", message.getTopic(), "times", message.getReconsumeTimes(),
                "fails", isFailed, "at", System.currentTimeMillis());
            return isFailed ? ConsumeConcurrentlyStatus.RECONSUME_LATER : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        DefaultMQPushConsumer dead = consumer(args[0], args[2] + "-dead", args[3]);
        dead.subscribe("%DLQ%" + args[2], "*");
        dead.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                Lines.print("dead", message.getKeys(), "times", message.getReconsumeTimes(), "of",
                    message.getProperty(MessageConst.PROPERTY_RETRY_TOPIC), "at", System.currentTimeMillis());
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        dead.start();
        Lines.print("started", true);
        while (System.in.read() >= 0) {
            // until the test closes the pipe
        }
        consumer.shutdown();
        dead.shutdown();
        Lines.print("done", true);
        System.exit(0);
    }

    private static DefaultMQPushConsumer consumer(String servers, String group, String name) {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(servers);
        consumer.setInstanceName(name);
        consumer.setPollNameServerInterval(1000);
        consumer.setPersistConsumerOffsetInterval(500);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        return consumer;
    }
}
