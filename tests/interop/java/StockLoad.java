import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Clients of several kinds with every setting at its default, until stdin ends.
 *
 * StockLoad NAMESERVERS TOPIC produce KIND:THREADS...: senders of SenderKinds; a key begins with its kind. They stop
 * at a line of stdin, {"sent": true}, and live on until its end: brokers ask them for the outcome of transactions.
 * StockLoad NAMESERVERS TOPIC consume KIND...: one consumer of each kind (concurrent, orderly, lite), each its own group.
 * A line {"key": key, "by": kind, "at": ms} for every message. With -Dpoll.ms=N they ask for routes each N ms.
 */
public final class StockLoad {
    public static void main(String[] args) throws Exception {
        List<String> kinds = Arrays.asList(args).subList(3, args.length);
        if (args[2].equals("consume")) {
            consume(args[0], args[1], kinds);
        } else {
            produce(args[0], args[1], kinds);
        }
        Lines.print("done", true);
        System.exit(0);
    }

    private static void produce(String servers, String topic, List<String> kinds) throws Exception {
        List<DefaultMQProducer> producers = new ArrayList<>();
        List<SendLoop> loops = new ArrayList<>();
        List<Thread[]> threads = new ArrayList<>();
        for (String each : kinds) {
            String kind = each.split(":")[0];
            SendLoop loop = new SendLoop(topic, 100);
            DefaultMQProducer producer = SenderKinds.producer(kind);
            knows(producer, servers);
            producer.start();
            producers.add(producer);
            loops.add(loop);
            threads.add(loop.start(SenderKinds.way(kind, producer, loop), Integer.parseInt(each.split(":")[1])));
        }
        System.in.read();
        for (int i = 0; i < loops.size(); i++) {
            loops.get(i).stop(threads.get(i));
        }
        SenderKinds.awaitAsync();
        Lines.print("sent", true);
        SendLoop.awaitEnd();
        for (DefaultMQProducer producer : producers) {
            producer.shutdown();
        }
    }

    private static void knows(ClientConfig client, String servers) {
        client.setNamesrvAddr(servers);
        client.setPollNameServerInterval(Integer.getInteger("poll.ms", client.getPollNameServerInterval()));
    }

    private static void consume(String servers, String topic, List<String> kinds) throws Exception {
        for (String kind : kinds) {
            if (kind.equals("lite")) {
                lite(servers, topic);
            } else {
                push(servers, topic, kind);
            }
        }
        Lines.print("started", true);
        SendLoop.awaitEnd();
    }

    private static void push(String servers, String topic, String kind) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("stock-" + kind);
        knows(consumer, servers);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, "*");
        if (kind.equals("orderly")) {
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                print(messages, kind);
                return ConsumeOrderlyStatus.SUCCESS;
            });
        } else {
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                print(messages, kind);
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
        }
        consumer.start();
    }

    private static void lite(String servers, String topic) throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer("stock-lite");
        knows(consumer, servers);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, "*");
        consumer.start();
        Thread reader = new Thread(() -> {
            while (true) {
                print(consumer.poll(1000), "lite");
            }
        }, "lite");
        reader.setDaemon(true);
        reader.start();
    }

    private static void print(List<MessageExt> messages, String kind) {
        for (MessageExt message : messages) {
            Lines.print("key", message.getKeys(), "by", kind, "at", System.currentTimeMillis());
        }
    }
}
