import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Locale;
import java.util.Queue;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.LongAdder;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageRequestMode;
import org.apache.rocketmq.remoting.protocol.subscription.SubscriptionGroupConfig;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/**
 * What else stock clients do, with messages of 1 KiB. Each line on standard input is answered by one
 * JSON line. {@code delays TOPIC THREADS MILLISECONDS} sends messages of delay level 1 for that long
 * and waits until a consumer has them all, {@code timers} the same with a time of their own;
 * {@code transactions TOPIC THREADS MILLISECONDS} commits for that long; {@code fill TOPIC THREADS
 * COUNT} sends messages with properties; {@code backs TOPIC GROUP COUNT} fails each message of a
 * backlog once, in a fresh group; {@code orderly}, {@code sql}, {@code pop TOPIC GROUP COUNT} consume
 * so many messages of a backlog in that way, {@code pop} at the broker ADDRESS that follows;
 * {@code quit}.
 */
public final class FeatureLoad {
    private static final long LEVEL_1_MS = 1000;
    /** Half of what {@code fill} sends. */
    private static final String EXPRESSION = "a >= 5 AND (region IN ('eu', 'us') OR b IS NULL)";
    private static final long LIMIT_S = 120;
    private static final byte[] BODY = "x".repeat(1024).getBytes(StandardCharsets.UTF_8);

    private interface Send {
        boolean one() throws Exception;
    }

    private static final class Commits implements TransactionListener {
        @Override
        public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
            return LocalTransactionState.COMMIT_MESSAGE;
        }

        @Override
        public LocalTransactionState checkLocalTransaction(MessageExt message) {
            return LocalTransactionState.COMMIT_MESSAGE;
        }
    }

    public static void main(String[] args) throws Exception {
        TransactionMQProducer producer = new TransactionMQProducer("bench_features");
        producer.setNamesrvAddr(args[0]);
        producer.setSendMsgTimeout(10_000);
        producer.setTransactionListener(new Commits());
        producer.start();
        System.out.println("{\"ready\":true}");
        try (var input = new java.util.Scanner(System.in)) {
            while (input.hasNextLine()) {
                String[] words = input.nextLine().trim().split(" ");
                switch (words[0]) {
                    case "delays":
                    case "timers":
                        System.out.println(delays(args[0], producer, words));
                        break;
                    case "fill":
                        System.out.println(fill(producer, words[1], words[2], Long.parseLong(words[3])));
                        break;
                    case "orderly":
                    case "sql":
                    case "pop":
                        System.out.println(consume(args[0], words));
                        break;
                    case "transactions":
                        System.out.println(send(words, () -> commit(producer, words[1])));
                        break;
                    case "backs":
                        System.out.println(backs(args[0], words[1], words[2], Long.parseLong(words[3])));
                        break;
                    default:
                        producer.shutdown();
                        System.exit(0);
                }
            }
        }
    }

    private static boolean commit(TransactionMQProducer producer, String topic) throws Exception {
        var sent = producer.sendMessageInTransaction(new Message(topic, BODY), null);
        return sent.getLocalTransactionState() == LocalTransactionState.COMMIT_MESSAGE;
    }

    private static String delays(String nameServers, TransactionMQProducer producer, String[] words) throws Exception {
        Queue<Long> late = new ConcurrentLinkedQueue<>();
        LongAdder seen = new LongAdder();
        DefaultMQPushConsumer consumer = consumer(nameServers, "bench_delays_" + System.nanoTime(), words[1]);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET);
        long began = System.currentTimeMillis();
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                if (message.getBornTimestamp() >= began) {
                    late.add(System.currentTimeMillis() - Long.parseLong(message.getUserProperty("due")));
                    seen.increment();
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        awaitQueues(consumer, words[1]);
        LongAdder acked = new LongAdder();
        AtomicLong number = new AtomicLong();
        boolean timers = words[0].equals("timers");
        String rate = send(words, () -> {
            Message message = new Message(words[1], BODY);
            long delay = timers ? LEVEL_1_MS + number.getAndIncrement() % 1000 : LEVEL_1_MS;
            long due = System.currentTimeMillis() + delay;
            message.putUserProperty("due", Long.toString(due));
            if (timers) {
                message.setDeliverTimeMs(due);
            } else {
                message.setDelayTimeLevel(1);
            }
            boolean good = producer.send(message).getSendStatus() == SendStatus.SEND_OK;
            if (good) {
                acked.increment();
            }
            return good;
        });
        long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(LIMIT_S);
        while (seen.sum() < acked.sum() && System.nanoTime() < end) {
            Thread.sleep(10);
        }
        consumer.shutdown();
        long[] sorted = late.stream().mapToLong(Long::longValue).sorted().toArray();
        return rate.substring(0, rate.length() - 1) + String.format(
                Locale.ROOT, ",\"seen\":%d,\"lateMs50\":%d,\"lateMs99\":%d}",
                sorted.length, share(sorted, 0.5), share(sorted, 0.99));
    }

    /** A consumer of a new topic may see its route only seconds later; what it reads by then is late. */
    private static void awaitQueues(DefaultMQPushConsumer consumer, String topic) throws Exception {
        var inner = consumer.getDefaultMQPushConsumerImpl();
        long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(LIMIT_S);
        while (inner.getRebalanceImpl().getProcessQueueTable().keySet().stream()
                .noneMatch(queue -> queue.getTopic().equals(topic))) {
            if (System.nanoTime() > end) {
                throw new IllegalStateException("no queue of " + topic + " came in " + LIMIT_S + " s");
            }
            inner.getmQClientFactory().updateTopicRouteInfoFromNameServer(topic);
            inner.doRebalance();
            Thread.sleep(50);
        }
    }

    private static long share(long[] sorted, double share) {
        return sorted.length == 0 ? -1 : sorted[(int) (share * (sorted.length - 1))];
    }

    /** {@code words}: what, topic, threads, milliseconds. */
    private static String send(String[] words, Send send) throws Exception {
        LongAdder acked = new LongAdder();
        LongAdder failed = new LongAdder();
        long begin = System.nanoTime();
        long end = begin + TimeUnit.MILLISECONDS.toNanos(Long.parseLong(words[3]));
        Thread[] senders = new Thread[Integer.parseInt(words[2])];
        for (int i = 0; i < senders.length; i++) {
            senders[i] = new Thread(() -> {
                while (System.nanoTime() < end) {
                    boolean good = false;
                    try {
                        good = send.one();
                    } catch (InterruptedException e) {
                        return;
                    } catch (Exception e) {
                        // Counted below; a window with failures is reported as such.
                    }
                    (good ? acked : failed).increment();
                }
            }, "sender-" + i);
            senders[i].start();
        }
        for (Thread sender : senders) {
            sender.join();
        }
        double seconds = (System.nanoTime() - begin) / 1e9;
        return String.format(
                Locale.ROOT, "{\"acked\":%d,\"failed\":%d,\"perSecond\":%.1f}",
                acked.sum(), failed.sum(), acked.sum() / seconds);
    }

    private static String fill(TransactionMQProducer producer, String topic, String threads, long wanted)
            throws Exception {
        AtomicLong numbers = new AtomicLong();
        long limit = TimeUnit.SECONDS.toMillis(LIMIT_S);
        return send(new String[] {"fill", topic, threads, Long.toString(limit)}, () -> {
            long number = numbers.getAndIncrement();
            if (number >= wanted) {
                throw new InterruptedException();
            }
            Message message = new Message(topic, BODY);
            message.putUserProperty("a", Long.toString(number % 10));
            message.putUserProperty("region", number % 2 == 0 ? "eu" : "us");
            return producer.send(message).getSendStatus() == SendStatus.SEND_OK;
        });
    }

    /** {@code words}: orderly, sql or pop, topic, group, count, and of pop the broker's address. */
    private static String consume(String nameServers, String[] words) throws Exception {
        long wanted = Long.parseLong(words[3]);
        AtomicLong first = new AtomicLong();
        AtomicLong last = new AtomicLong();
        AtomicLong count = new AtomicLong();
        CountDownLatch done = new CountDownLatch(1);
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(words[2]);
        consumer.setNamesrvAddr(nameServers);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        if (words[0].equals("pop")) {
            popMode(nameServers, words[1], words[2], words[4]);
            consumer.setClientRebalance(false);
        }
        if (words[0].equals("sql")) {
            consumer.subscribe(words[1], MessageSelector.bySql(EXPRESSION));
        } else {
            consumer.subscribe(words[1], "*");
        }
        java.util.function.Consumer<List<MessageExt>> took = messages -> {
            first.compareAndSet(0, System.nanoTime());
            if (count.addAndGet(messages.size()) >= wanted && last.compareAndSet(0, System.nanoTime())) {
                done.countDown();
            }
        };
        if (words[0].equals("orderly")) {
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                took.accept(messages);
                return ConsumeOrderlyStatus.SUCCESS;
            });
        } else {
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                took.accept(messages);
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
        }
        consumer.start();
        boolean finished = done.await(LIMIT_S, TimeUnit.SECONDS);
        double seconds = ((finished ? last.get() : System.nanoTime()) - first.get()) / 1e9;
        consumer.shutdown();
        return String.format(
                Locale.ROOT, "{\"finished\":%b,\"count\":%d,\"perSecond\":%.1f}",
                finished, count.get(), count.get() / seconds);
    }

    private static void popMode(String nameServers, String topic, String group, String broker) throws Exception {
        DefaultMQAdminExt admin = new DefaultMQAdminExt();
        admin.setNamesrvAddr(nameServers);
        admin.start();
        SubscriptionGroupConfig config = new SubscriptionGroupConfig();
        config.setGroupName(group);
        admin.createAndUpdateSubscriptionGroupConfig(broker, config);
        admin.setMessageRequestMode(broker, topic, group, MessageRequestMode.POP, 0, 5000);
        admin.shutdown();
    }

    private static String backs(String nameServers, String topic, String group, long wanted) throws Exception {
        AtomicLong first = new AtomicLong();
        AtomicLong count = new AtomicLong();
        CountDownLatch done = new CountDownLatch(1);
        DefaultMQPushConsumer consumer = consumer(nameServers, group, topic);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            if (messages.get(0).getReconsumeTimes() > 0) {
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            }
            first.compareAndSet(0, System.nanoTime());
            if (count.addAndGet(messages.size()) >= wanted) {
                done.countDown();
            }
            return ConsumeConcurrentlyStatus.RECONSUME_LATER;
        });
        consumer.start();
        boolean finished = done.await(LIMIT_S, TimeUnit.SECONDS);
        double seconds = (System.nanoTime() - first.get()) / 1e9;
        consumer.shutdown();
        return String.format(
                Locale.ROOT, "{\"finished\":%b,\"count\":%d,\"perSecond\":%.1f}",
                finished, count.get(), count.get() / seconds);
    }

    private static DefaultMQPushConsumer consumer(String nameServers, String group, String topic) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(nameServers);
        consumer.subscribe(topic, "*");
        return consumer;
    }

    private FeatureLoad() {
    }
}
