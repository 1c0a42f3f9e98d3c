import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collection;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ArrayBlockingQueue;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.RequestCallback;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.protocol.heartbeat.MessageModel;

/**
 * Consumers NAMESERVERS: clients of every kind in one JVM, one command per line of stdin. Its words are in `run`.
 * A line {"did": command}, or {"refused": command, "code", "why"}, for each; a line {"by": name, "key", ...} for
 * every message, `from` and `to` of one clock in ns.
 */
public final class Consumers {
    private static final int NOT_FROM_A_BROKER = -1;
    private static final Map<String, DefaultMQPushConsumer> PUSHED = new HashMap<>();
    private static final Map<String, LiteLoop> LITE = new HashMap<>();
    private static final List<Thread> LOOPS = new ArrayList<>();
    private static final List<Runnable> ENDINGS = new ArrayList<>();
    private static String servers;
    private static volatile boolean stopped;

    public static void main(String[] args) throws Exception {
        servers = args[0];
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = commands.readLine(); line != null; line = commands.readLine()) {
            try {
                run(line.split(" ", 7));
                Lines.print("did", line);
            } catch (MQClientException error) {
                Lines.print("refused", line, "code", error.getResponseCode(), "why", error.getErrorMessage());
            } catch (RuntimeException error) {
                Lines.print("refused", line, "code", NOT_FROM_A_BROKER, "why", error);
            }
        }
        stop();
        for (Runnable ending : ENDINGS) {
            ending.run();
        }
        Lines.print("done", true);
        System.exit(0);
    }

    private static void run(String[] words) throws Exception {
        switch (words[0]) {
            case "orderly": // NAME GROUP TOPIC
                orderly(words[1], words[2], words[3]);
                return;
            case "push": // NAME GROUP TOPIC MODEL TAG|SQL92 EXPRESSION
                push(words[1], words[2], words[3], words[4], selector(words[5], words[6]));
                return;
            case "leave": // NAME
                PUSHED.remove(words[1]).shutdown();
                return;
            case "lite": // NAME GROUP TOPIC subscribe|assign
                LITE.put(words[1], new LiteLoop(words[1], words[2], words[3], words[4].equals("assign")));
                return;
            case "seek": // NAME QUEUE OFFSET
                LITE.get(words[1]).seek(words[2], Long.parseLong(words[3]));
                return;
            case "pause": // NAME QUEUE
                LITE.get(words[1]).consumer.pause(LITE.get(words[1]).queues(words[2]));
                return;
            case "resume": // NAME QUEUE
                LITE.get(words[1]).consumer.resume(LITE.get(words[1]).queues(words[2]));
                return;
            case "commit": // NAME
                LITE.get(words[1]).consumer.commit();
                return;
            case "end": // NAME
                LITE.remove(words[1]).end();
                return;
            case "answer": // NAME GROUP TOPIC
                answer(words[1], words[2], words[3]);
                return;
            case "ask": // NAME TOPIC
                ask(words[1], words[2]);
                return;
            case "load": // TOPIC LANES
                load(words[1], Integer.parseInt(words[2]));
                return;
            case "stop": // the loops that send, and those that ask
                stop();
                return;
            default:
                throw new IllegalArgumentException(words[0]);
        }
    }

    private static void stop() throws InterruptedException {
        stopped = true;
        for (Thread loop : LOOPS) {
            loop.join();
        }
    }

    private static MessageSelector selector(String type, String expression) {
        return type.equals("SQL92") ? MessageSelector.bySql(expression) : MessageSelector.byTag(expression);
    }

    private static <T extends ClientConfig> T configured(String name, T client) {
        client.setNamesrvAddr(servers);
        client.setInstanceName(name);
        client.setPollNameServerInterval(1000);
        // A heartbeat that finds its lock taken is left out, and its subscription is late by one interval.
        client.setHeartbeatBrokerInterval(1000);
        client.setPersistConsumerOffsetInterval(500);
        return client;
    }

    private static void orderly(String name, String group, String topic) throws MQClientException {
        DefaultMQPushConsumer consumer = configured(name, new DefaultMQPushConsumer(group));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeThreadMin(4);
        consumer.setConsumeThreadMax(4);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            long from = System.nanoTime();
            pause(2);
            boolean suspends = "S".equals(messages.get(0).getTags()) && messages.get(0).getReconsumeTimes() == 0;
            for (MessageExt message : messages) {
                print(name, message, from, suspends);
            }
            context.setSuspendCurrentQueueTimeMillis(100);
            return suspends ? ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT : ConsumeOrderlyStatus.SUCCESS;
        });
        begin(name, consumer);
    }

    private static void push(String name, String group, String topic, String model, MessageSelector selector)
        throws MQClientException {
        DefaultMQPushConsumer consumer = configured(name, new DefaultMQPushConsumer(group));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setEnableTrace(true);
        consumer.setMessageModel(MessageModel.valueOf(model));
        consumer.setConsumeThreadMin(2);
        consumer.setConsumeThreadMax(2);
        consumer.subscribe(topic, selector);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                print(name, message, System.nanoTime(), false);
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        begin(name, consumer);
    }

    private static void begin(String name, DefaultMQPushConsumer consumer) throws MQClientException {
        consumer.start();
        PUSHED.put(name, consumer);
        ENDINGS.add(consumer::shutdown);
    }

    private static void print(String name, MessageExt message, long from, boolean suspends) {
        Lines.print("by", name, "key", message.getKeys(), "queueId", message.getQueueId(),
            "queueOffset", message.getQueueOffset(), "suspends", suspends, "from", from, "to", System.nanoTime());
    }

    private static void answer(String name, String group, String topic) throws MQClientException {
        DefaultMQProducer replies = configured(name + "-replies", new DefaultMQProducer(group + "-replies"));
        replies.start();
        DefaultMQPushConsumer consumer = configured(name, new DefaultMQPushConsumer(group));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            try {
                for (MessageExt message : messages) {
                    String question = new String(message.getBody(), StandardCharsets.UTF_8);
                    byte[] body = ("answer to " + question).getBytes(StandardCharsets.UTF_8);
                    replies.send(MessageUtil.createReplyMessage(message, body), 3000);
                }
            } catch (Exception error) {
                Lines.print("by", name, "notReplied", error);
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        begin(name, consumer);
        // Its rebalances may meet a race of the stock client and be repeated after 20 s only.
        while (consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable().size() < 2) {
            pause(10);
        }
        ENDINGS.add(replies::shutdown);
    }

    private static void ask(String name, String topic) throws MQClientException {
        DefaultMQProducer producer = configured(name, new DefaultMQProducer("asking"));
        producer.start();
        loop(name, () -> {
            for (int i = 0; !stopped; i++) {
                String question = name + "-" + i;
                Message message = new Message(topic, "", question, question.getBytes(StandardCharsets.UTF_8));
                Lines.print(requested(producer, message));
                pause(20);
            }
            producer.shutdown();
        });
    }

    /** By a callback: the blocking request of 5.3.3 gives up as soon as the broker has the question. */
    private static Object[] requested(DefaultMQProducer producer, Message message) {
        BlockingQueue<Object> told = new ArrayBlockingQueue<>(1);
        try {
            producer.request(message, new RequestCallback() {
                @Override
                public void onSuccess(Message answer) {
                    told.offer(new String(answer.getBody(), StandardCharsets.UTF_8));
                }

                @Override
                public void onException(Throwable error) {
                    told.offer(error);
                }
            }, 3000);
            Object answer = told.take();
            String field = answer instanceof Throwable ? "why" : "answer";
            return new Object[] {"asked", message.getKeys(), field, answer};
        } catch (Exception error) {
            return new Object[] {"asked", message.getKeys(), "why", error};
        }
    }

    /** Each lane sends its numbers in order to one queue, each until it is acknowledged. Two in a hundred have tag S. */
    private static void load(String topic, int lanes) throws MQClientException {
        DefaultMQProducer producer =
            configured("load", new DefaultMQProducer("loading", null, true, null));
        producer.start();
        AtomicInteger running = new AtomicInteger(lanes);
        for (int i = 0; i < lanes; i++) {
            int lane = i;
            loop("lane-" + lane, () -> {
                for (int number = 0; !stopped; number++) {
                    send(producer, topic, lane, number);
                    pause(30);
                }
                if (running.decrementAndGet() == 0) {
                    producer.shutdown();
                }
            });
        }
    }

    private static void send(DefaultMQProducer producer, String topic, int lane, int number) {
        String key = lane + "-" + number;
        String tag = number % 50 == 20 ? "S" : number % 2 == 0 ? "A" : "B";
        Message message = new Message(topic, tag, key, key.getBytes(StandardCharsets.UTF_8));
        message.putUserProperty("n", String.valueOf(number));
        message.putUserProperty("kind", Arrays.asList("red", "green", "blue").get(number % 3));
        if (number % 7 == 0) {
            message.putUserProperty("note", "it's seven");
        }
        while (true) {
            try {
                if (producer.send(message, (queues, m, l) -> queues.get((Integer) l % queues.size()), lane)
                    .getSendStatus() == SendStatus.SEND_OK) {
                    Lines.print("acked", key);
                    return;
                }
            } catch (Exception error) {
                Lines.print("notSent", key, "why", error);
            }
            pause(20);
        }
    }

    private static void loop(String name, Runnable body) {
        Thread loop = new Thread(body, name);
        LOOPS.add(loop);
        loop.start();
    }

    static void pause(long ms) {
        try {
            Thread.sleep(ms);
        } catch (InterruptedException error) {
            throw new IllegalStateException(error);
        }
    }

    /** A lite pull consumer and the thread that polls it. It commits when it is told to. */
    private static final class LiteLoop {
        final DefaultLitePullConsumer consumer;
        private final String topic;
        private final Thread thread;
        private volatile boolean ends;

        LiteLoop(String name, String group, String topic, boolean assigns) throws Exception {
            this.topic = topic;
            consumer = configured(name, new DefaultLitePullConsumer(group));
            consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
            consumer.setAutoCommit(!assigns);
            if (!assigns) {
                consumer.subscribe(topic, "*");
            }
            consumer.start();
            if (assigns) {
                // Without a seek: it interrupts a thread that may read another queue by then, and what that
                // thread has just pulled is never polled.
                consumer.assign(consumer.fetchMessageQueues(topic));
            }
            thread = new Thread(() -> {
                while (!ends) {
                    for (MessageExt message : consumer.poll(100)) {
                        print(name, message, System.nanoTime(), false);
                    }
                }
                consumer.shutdown();
            }, name);
            thread.start();
            ENDINGS.add(this::end);
        }

        void end() {
            ends = true;
            try {
                thread.join();
            } catch (InterruptedException error) {
                throw new IllegalStateException(error);
            }
        }

        Collection<MessageQueue> queues(String id) throws MQClientException {
            for (MessageQueue queue : consumer.fetchMessageQueues(topic)) {
                if (queue.getQueueId() == Integer.parseInt(id)) {
                    return Collections.singleton(queue);
                }
            }
            throw new IllegalArgumentException("no queue " + id + " of " + topic);
        }

        void seek(String queueId, long offset) throws MQClientException {
            consumer.seek(queues(queueId).iterator().next(), offset);
        }
    }
}
